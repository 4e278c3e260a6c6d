//! Reading a profile, and what its schema alone cannot check.

use super::{NetworkDefault, Period, Profile};
use crate::{Error, ErrorKind, Result, egress::Rules, route::Strategy, secret};

impl Profile {
    /// Reads a profile; `origin` is the file's name for messages.
    ///
    /// # Errors
    ///
    /// `InvalidSpec` with the file, the line and the field if it is no YAML, has a field that there is
    /// not, lacks one that there must be, or says something that makes no sense.
    pub fn from_yaml(text: &str, origin: &str) -> Result<Self> {
        let profile: Self = serde_saphyr::from_str(text).map_err(|error| {
            let said = error.without_snippet().to_string();
            let line = error.location().map(|location| location.line());
            let number = line.and_then(|line| usize::try_from(line).ok()).unwrap_or_default();
            let read = text.lines().nth(number.saturating_sub(1)).unwrap_or_default().trim();
            let said = said.lines().next().unwrap_or_default();
            invalid(
                origin,
                line,
                &format!("{said}: {}", read.chars().take(100).collect::<String>()),
            )
        })?;
        if let Some((field, complaint)) = profile.complaints().first() {
            return Err(invalid(origin, line_of(text, field), &format!("{field}: {complaint}")));
        }
        Ok(profile)
    }

    /// What makes no sense, with the field that says it.
    fn complaints(&self) -> Vec<(&'static str, String)> {
        let mut found = Vec::new();
        let mut complain = |field, complaint: String| found.push((field, complaint));
        if let (Some(default), Some(max)) = (self.ttl.default, self.ttl.max)
            && default > max
        {
            complain("ttl.default", format!("{default} is longer than the max, {max}"));
        }
        if self.route.strategy == Strategy::Explicit
            && !self.route.extensions.is_empty()
            && !self.route.extensions.contains(&self.extension)
        {
            let message = format!("the route is explicit, but {} is not in it", self.extension);
            complain("route.extensions", message);
        }
        let usable = |number: f64| number.is_finite() && number > 0.0 && number <= 100_000.0;
        if let Some(cpu) = self.resources.cpu
            && !usable(cpu)
        {
            complain("resources.cpu", format!("{cpu} is no number of CPUs"));
        }
        if let Some(cost) = self.route.max_cost_per_hour_usd
            && !(cost.is_finite() && (0.0..=1e9).contains(&cost))
        {
            complain("route.max_cost_per_hour_usd", format!("{cost} is no price"));
        }
        for (field, value) in [
            ("resources.memory_mb", self.resources.memory_mb),
            ("resources.pids", self.resources.pids),
            ("resources.disk_mb", self.resources.disk_mb),
        ] {
            if value.is_some_and(|value| value == 0 || value > 1 << 40) {
                complain(field, "it must be positive, or left out for no limit".into());
            }
        }
        for reference in &self.setup.secret_refs {
            if let Err(error) = secret::check_reference(reference) {
                complain("setup.secret_refs", error.message().to_owned());
            }
        }
        if !self.setup.secret_refs.is_empty() && self.setup.commands.is_empty() {
            let message = "there are no commands that could use them".to_owned();
            complain("setup.secret_refs", message);
        }
        if self.setup.commands.iter().any(|text| text.trim().is_empty() || text.contains('\0')) {
            complain("setup.commands", "one of them is empty or has a NUL byte".into());
        }
        if let Err(why) = Rules::parse(&self.network.egress) {
            complain("network.egress", why);
        }
        if !self.network.egress.is_empty() && self.network.default == NetworkDefault::Allow {
            let message = "single hosts are let through where the default is `deny`".to_owned();
            complain("network.egress", message);
        }
        for (field, words) in [
            ("placement.prefer", &self.placement.prefer),
            ("placement.fallback", &self.placement.fallback),
        ] {
            if let Some(bad) = words.iter().find(|word| !is_host(word)) {
                complain(field, format!("{bad:?} is no host"));
            }
        }
        if self.image.as_deref().is_some_and(|image| image.is_empty() || !is_host(image)) {
            complain("image", "it is no image's name".into());
        }
        found
    }

    /// The time that a sandbox of this profile lives, if it is asked for `asked`: that, else the
    /// default, and never more than the max.
    #[must_use]
    pub fn ttl(&self, asked: Option<Period>) -> Option<Period> {
        match (asked.or(self.ttl.default), self.ttl.max) {
            (Some(wanted), Some(max)) => Some(wanted.min(max)),
            (wanted, max) => wanted.or(max),
        }
    }
}

/// A name that cannot be taken for an option or anything else: `host`, `*.host:443`, `[::1]:22`.
fn is_host(word: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._-:*[]@/".contains(c);
    !word.is_empty() && word.len() <= 255 && !word.starts_with('-') && word.chars().all(plain)
}

/// The line that a field is on: that of its last part, below that of the parts before it.
fn line_of(text: &str, field: &str) -> Option<u64> {
    let mut from = 0;
    let mut found = None;
    for part in field.split('.') {
        let key = format!("{part}:");
        let lines = text.lines().enumerate().skip(from);
        let (number, _) = lines.into_iter().find(|(_, line)| {
            let code = line.split(" #").next().unwrap_or_default();
            code.split([' ', '{', ',']).any(|word| word == key || word.starts_with(&key))
        })?;
        from = number;
        found = Some(number as u64 + 1);
    }
    found
}

fn invalid(origin: &str, line: Option<u64>, why: &str) -> Error {
    let place = line.map_or_else(|| origin.to_owned(), |line| format!("{origin}:{line}"));
    Error::new(ErrorKind::InvalidSpec, "read a profile", format!("{place}: {why}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "id: profile.x\nversion: \"1\"\nextension: ext.bwrap\n";

    fn refused(rest: &str) -> String {
        let error = Profile::from_yaml(&format!("{HEAD}{rest}"), "x.yaml").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidSpec);
        error.message().to_owned()
    }

    #[test]
    fn only_three_fields_are_required() {
        let profile = Profile::from_yaml(HEAD, "x.yaml").unwrap();
        assert_eq!(profile.extension.as_str(), "bwrap");
        assert_eq!(profile.route.strategy, Strategy::Explicit);
        for missing in ["id", "version", "extension"] {
            let text: String = HEAD
                .lines()
                .filter(|line| !line.starts_with(missing))
                .map(|l| format!("{l}\n"))
                .collect();
            let error = Profile::from_yaml(&text, "x.yaml").unwrap_err();
            assert!(error.message().contains(missing), "{error}");
        }
    }

    #[test]
    fn the_documented_profile_is_one() {
        let text = r#"
id: profile.agent-dev
version: "1.0.0"
extension: ext.bwrap                       # the backend of the route `explicit`
route:                                     # optional; without it: explicit
  strategy: prefer-self-hosted             # explicit | prefer-self-hosted | lowest-cost | lowest-latency
  extensions: [ext.bwrap, ext.docker, ext.compose-ssh]
  max_cost_per_hour_usd: 0.5
isolation: {level: container}              # process | container | microvm: the least that is acceptable
image: debian:bookworm-slim                # container backends
network: {default: deny, egress: []}       # egress: host[:port] patterns that are allowed
workspace: {mode: overlay, access: rw}     # overlay | copy | bind | remote-canonical
scope_default: session
ttl: {default: 4h, max: 24h, idle_reap: 30m}   # positive integer + s|m|h|d
resources: {cpu: 2, memory_mb: 2048, pids: 512, disk_mb: null}
setup: {instructions: "…", commands: [], secret_refs: []}
placement: {prefer: [sandboxer01], fallback: [coulombcore]}   # hosts, for backends that have hosts
reachability: {tunnel: ops-bridge, identity: ops-warden}
metadata: {cost_class: self-hosted, latency_class: standard}
"#;
        let profile = Profile::from_yaml(text, "agent-dev.yaml").unwrap();
        insta::assert_json_snapshot!(profile);
    }

    #[test]
    fn what_is_not_a_field_is_named_with_file_and_line() {
        let message = refused("ttl:\n  default: 4h\n  maximum: 5h\n");
        assert!(message.starts_with("x.yaml:6: "), "{message}");
        assert!(message.contains("maximum"), "{message}");
        let message = refused("image: x\ncolour: red\n");
        assert!(message.starts_with("x.yaml:5: ") && message.contains("colour"), "{message}");
    }

    #[test]
    fn what_makes_no_sense_is_refused_at_its_line() {
        for (rest, place, says) in [
            ("ttl: {default: 4x}\n", "x.yaml:4: ", "s, m, h or d"),
            ("ttl: {default: 4}\n", "x.yaml:4: ", "s, m, h or d"),
            ("ttl:\n  max: 1h\n  default: 2h\n", "x.yaml:6: ", "ttl.default: 2h is longer"),
            ("isolation: {level: castle}\n", "x.yaml:4: ", "castle"),
            ("route: {strategy: cheapest}\n", "x.yaml:4: ", "cheapest"),
            ("route: {extensions: [ext.docker]}\n", "x.yaml:4: ", "is not in it"),
            ("resources: {cpu: 0}\n", "x.yaml:4: ", "resources.cpu"),
            ("resources:\n  pids: 0\n", "x.yaml:5: ", "resources.pids"),
            ("resources: {pids: -1}\n", "x.yaml:4: ", "-1"),
            ("setup: {commands: [a], secret_refs: [\"a=b\"]}\n", "x.yaml:4: ", "setup.secret_refs"),
            ("setup: {secret_refs: [A]}\n", "x.yaml:4: ", "no commands"),
            ("setup: {commands: [\" \"]}\n", "x.yaml:4: ", "setup.commands"),
            ("network: {egress: [\"*\"]}\n", "x.yaml:4: ", "network.egress"),
            ("network:\n  egress: [\"a:b\"]\n", "x.yaml:5: ", "the port"),
            ("network: {default: allow, egress: [a]}\n", "x.yaml:4: ", "default is `deny`"),
            ("placement: {prefer: [-oProxyCommand=x]}\n", "x.yaml:4: ", "placement.prefer"),
            ("image: \"a b\"\n", "x.yaml:4: ", "image"),
            ("image: a\nimage: b\n", "x.yaml:5: ", "image"),
            ("ttl: [\n", "x.yaml:", ""),
        ] {
            let message = refused(rest);
            assert!(message.starts_with(place) && message.contains(says), "{rest}: {message}");
        }
    }

    #[test]
    fn time_is_what_was_asked_for_within_the_max() {
        let with =
            |ttl: &str| Profile::from_yaml(&format!("{HEAD}ttl: {{{ttl}}}\n"), "x.yaml").unwrap();
        let hours = |n: u64| Some(Period::from_seconds(n * 3600));
        let both = with("default: 4h, max: 24h");
        assert_eq!(both.ttl(None), hours(4));
        assert_eq!(both.ttl(hours(6)), hours(6));
        assert_eq!(both.ttl(hours(30)), hours(24));
        assert_eq!(with("max: 2h").ttl(None), hours(2));
        assert_eq!(with("").ttl(None), None);
        assert_eq!(with("").ttl(hours(1)), hours(1));
    }
}
