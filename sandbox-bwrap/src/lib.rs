//! The local backend: bubblewrap.
