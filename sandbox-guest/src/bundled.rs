/// The guest program for the build machine's architecture, when the feature `bundled` is on.
///
/// `None` without the feature: then a binary must come from elsewhere.
#[must_use]
pub fn bundled() -> Option<&'static [u8]> {
    #[cfg(feature = "bundled")]
    {
        Some(include_bytes!(concat!(env!("OUT_DIR"), "/sandbox-guest.bin")))
    }
    #[cfg(not(feature = "bundled"))]
    {
        None
    }
}
