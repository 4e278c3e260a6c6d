/// The guest program for the build machine's architecture, when the feature `bundled` is on.
///
/// `None` without the feature, or where the build machine cannot build a Linux program: then a binary
/// must come from elsewhere.
#[must_use]
pub fn bundled() -> Option<&'static [u8]> {
    #[cfg(all(feature = "bundled", not(no_bundled)))]
    {
        Some(include_bytes!(concat!(env!("OUT_DIR"), "/sandbox-guest.bin")))
    }
    #[cfg(not(all(feature = "bundled", not(no_bundled))))]
    {
        None
    }
}
