//! What processes take in memory, as `/proc` says.

use std::fs;

/// This process's peak since it was begun to be watched, beyond what it had then.
pub(crate) struct Watch {
    before: u64,
}

impl Watch {
    pub(crate) fn begin() -> Self {
        // Sets the peak back to what is in use now.
        let _ = fs::write("/proc/self/clear_refs", "5");
        Self { before: field("self", "status", "VmRSS:").unwrap_or(0) }
    }

    /// By how much the peak is higher, in MB (10⁶ bytes).
    pub(crate) fn growth(&self) -> f64 {
        let peak = field("self", "status", "VmHWM:").unwrap_or(0);
        peak.saturating_sub(self.before) as f64 / 1e6
    }
}

/// The resident set of this process, in bytes.
pub(crate) fn own() -> u64 {
    field("self", "status", "VmRSS:").unwrap_or(0)
}

/// A process's share of memory: what it shares with others counts in parts. Its whole resident set where
/// the kernel does not let this user see that; which of the two it is.
pub(crate) fn share(pid: u32) -> (u64, &'static str) {
    let pid = pid.to_string();
    match field(&pid, "smaps_rollup", "Pss:") {
        Some(share) => (share, "PSS"),
        None => (field(&pid, "status", "VmRSS:").unwrap_or(0), "RSS"),
    }
}

/// The parent of a process.
pub(crate) fn parent(pid: u32) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
    line.trim().parse().ok()
}

/// What a process calls itself.
pub(crate) fn name(pid: u32) -> String {
    fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default().trim().to_owned()
}

/// A line of a file about a process, in bytes.
fn field(pid: &str, file: &str, name: &str) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/{file}")).ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}
