//! Which symbolic links stay inside the tree that they are in.

/// Whether a link in a directory so many levels below the root of a tree stays inside, whatever the other
/// links of the tree say, as long as they stay inside too.
///
/// `..` is followed only at the beginning, where it leaves real directories: after a name, which may be a
/// link's, it could lead anywhere.
pub(super) fn stays_inside(target: &[u8], depth: usize) -> bool {
    if target.starts_with(b"/") {
        return false;
    }
    let mut up = 0;
    let mut down = false;
    for part in target.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." if down => return false,
            b".." => up += 1,
            _ => down = true,
        }
    }
    up <= depth
}

#[cfg(test)]
mod tests {
    use super::stays_inside;

    #[test]
    fn links_that_stay_inside_are_told_from_others() {
        let inside: &[(&str, usize)] = &[
            ("file", 0),
            ("a/b/../c", 9),
            ("./a//b/", 0),
            ("..", 1),
            ("../a", 1),
            ("../../a/b", 2),
            ("./.././../a", 2),
            ("...", 0),
            ("..a", 0),
            ("", 0),
        ];
        for (target, depth) in inside {
            let expected = !target.contains("b/..");
            assert_eq!(stays_inside(target.as_bytes(), *depth), expected, "{target} at {depth}");
        }
        for (target, depth) in
            [("/", 3), ("/etc/passwd", 3), ("..", 0), ("../../a", 1), ("a/..", 0), ("a/../../b", 5)]
        {
            assert!(!stays_inside(target.as_bytes(), depth), "{target} at {depth}");
        }
    }
}
