//! Figures, and how they are printed.

use std::time::Duration;

use sandbox_examples::figures::round;
use serde_json::{Value, json};

/// A figure beside a peer's.
pub(crate) struct Figure<'a> {
    pub(crate) metric: &'a str,
    pub(crate) value: f64,
    pub(crate) unit: &'a str,
    pub(crate) peer: &'a str,
    pub(crate) peer_value: f64,
}

impl Figure<'_> {
    pub(crate) fn print(&self) {
        print(&self.line());
    }

    fn line(&self) -> Value {
        json!({
            "metric": self.metric, "backend": "bwrap", "value": round(self.value), "unit": self.unit,
            "peer": self.peer, "peer_value": round(self.peer_value),
            "ratio": round(self.value / self.peer_value),
        })
    }
}

/// A time in milliseconds beside a peer's.
pub(crate) fn report(metric: &str, value: f64, peer: &str, peer_value: f64) {
    Figure { metric, value, unit: "ms", peer, peer_value }.print();
}

/// A figure that has a bound: the value must not be above it.
pub(crate) fn report_bounded(metric: &str, value: f64, unit: &str, asked: f64) {
    print(&json!({
        "metric": metric, "backend": "bwrap", "value": round(value), "unit": unit,
        "asked": format!("at most {asked}"), "met": value <= asked,
    }));
}

/// A figure by itself; `of` says what it is of.
pub(crate) fn report_plain(metric: &str, value: f64, unit: &str, of: &str) {
    print(&json!({
        "metric": metric, "backend": "bwrap", "value": round(value), "unit": unit, "of": of,
    }));
}

fn print(line: &Value) {
    println!("{line}");
}

/// Megabytes (10⁶ bytes) a second.
pub(crate) fn rate(bytes: u64, time: Duration) -> f64 {
    bytes as f64 / 1e6 / time.as_secs_f64()
}
