//! A hash of what is in a file, to tell whether it changed when its time and size do not: the same in
//! every release. Not against forgery.

/// FNV-1a over words of eight bytes and then single ones, of 64 bits.
#[derive(Debug, Clone)]
pub struct ContentHash {
    state: u64,
    rest: [u8; 8],
    length: usize,
}

const PRIME: u64 = 0x0000_0100_0000_01b3;

impl Default for ContentHash {
    fn default() -> Self {
        Self { state: 0xcbf2_9ce4_8422_2325, rest: [0; 8], length: 0 }
    }
}

impl ContentHash {
    /// Adds the next bytes; how they are divided does not matter.
    pub fn write(&mut self, mut bytes: &[u8]) {
        if self.length > 0 {
            let now = bytes.len().min(8 - self.length);
            self.rest[self.length..self.length + now].copy_from_slice(&bytes[..now]);
            self.length += now;
            bytes = &bytes[now..];
            if self.length < 8 {
                return;
            }
            self.word(self.rest);
            self.length = 0;
        }
        let (words, rest) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| self.word(*word));
        self.rest[..rest.len()].copy_from_slice(rest);
        self.length = rest.len();
    }

    /// The hash of all that was added.
    #[must_use]
    pub fn finish(&self) -> u64 {
        let mut last = self.clone();
        for index in 0..self.length {
            last.state = (last.state ^ u64::from(self.rest[index])).wrapping_mul(PRIME);
        }
        // The upper bits of a product say more than the lower ones.
        last.state ^ (last.state >> 29)
    }

    fn word(&mut self, word: [u8; 8]) {
        let mixed = (self.state ^ u64::from_le_bytes(word)).wrapping_mul(PRIME);
        self.state = mixed ^ (mixed >> 32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(pieces: &[&[u8]]) -> u64 {
        let mut hash = ContentHash::default();
        pieces.iter().for_each(|piece| hash.write(piece));
        hash.finish()
    }

    #[test]
    fn pieces_do_not_matter_and_bytes_do() {
        let text = b"some bytes that are longer than a word";
        let whole = hash(&[text]);
        for at in 0..text.len() {
            assert_eq!(hash(&[&text[..at], &text[at..]]), whole, "{at}");
            let mut other = *text;
            other[at] ^= 1;
            assert_ne!(hash(&[&other]), whole, "{at}");
        }
        assert_ne!(hash(&[b"v1\n"]), hash(&[b"v2\n"]));
        assert_ne!(hash(&[b"\0"]), hash(&[]));
    }
}
