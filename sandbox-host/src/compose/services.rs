//! How the services of a project are, as the engine tells.

use std::collections::BTreeMap;

use serde::Deserialize;

/// A container of a service, as `inspect` describes it; what is not needed is left out.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub(super) struct Container {
    pub(super) id: String,
    #[serde(default)]
    name: String,
    state: State,
    #[serde(default)]
    restart_count: u64,
    #[serde(default)]
    config: Config,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct State {
    status: String,
    #[serde(default)]
    exit_code: i64,
    #[serde(default)]
    error: String,
    #[serde(default)]
    started_at: String,
    #[serde(default)]
    health: Option<Health>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Health {
    #[serde(default)]
    status: String,
    #[serde(default)]
    log: Option<Vec<Check>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Check {
    #[serde(default)]
    output: String,
}

#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Config {
    #[serde(default)]
    labels: Option<BTreeMap<String, String>>,
}

/// How a service is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Condition {
    /// It runs, and its health check says that it is well.
    Healthy,
    /// It runs, as far as can be told without a health check.
    Runs,
    /// It has done its work, and said so.
    Done,
    /// Not yet.
    NotYet(String),
    /// It will not.
    Failed(String),
}

impl Container {
    /// Its service's name.
    pub(super) fn service(&self) -> &str {
        let labels = self.config.labels.as_ref();
        let named = labels.and_then(|labels| labels.get("com.docker.compose.service"));
        named.map_or(self.name.trim_start_matches('/'), String::as_str)
    }

    pub(super) fn condition(&self) -> Condition {
        let State { status, exit_code, error, health, .. } = &self.state;
        let health =
            health.as_ref().filter(|health| !matches!(health.status.as_str(), "" | "none"));
        match (status.as_str(), health) {
            ("running", None) => Condition::Runs,
            ("running", Some(health)) => match health.status.as_str() {
                "healthy" => Condition::Healthy,
                "unhealthy" => {
                    let last = health.log.as_ref().and_then(|log| log.last());
                    let said = last.map_or("", |check| check.output.trim());
                    let said = if said.is_empty() { String::new() } else { format!(": {said}") };
                    Condition::Failed(format!("its health check fails{said}"))
                }
                other => Condition::NotYet(format!("its health is {other}")),
            },
            ("exited" | "stopped", _) if *exit_code == 0 && error.is_empty() => Condition::Done,
            ("exited" | "stopped" | "dead", _) => {
                let why = if error.is_empty() { String::new() } else { format!(": {error}") };
                Condition::Failed(format!("it ended with code {exit_code}{why}"))
            }
            ("created", _) if !error.is_empty() => {
                Condition::Failed(format!("it cannot be started: {error}"))
            }
            (other, _) => Condition::NotYet(format!("it is {other}")),
        }
    }

    /// What changes when it is started anew.
    fn run(&self) -> (String, String, u64) {
        (self.id.clone(), self.state.started_at.clone(), self.restart_count)
    }
}

/// How a whole project is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// All of it is ready.
    Ready,
    /// All of it runs; whether it goes on to, a second look tells, if this is the same then.
    Runs(Vec<(String, String, u64)>),
    /// Something is not ready yet.
    NotYet(String),
    /// A service will not be: the container, its service, and why.
    Failed { container: String, service: String, why: String },
}

/// Judges all containers of a project.
pub(super) fn judge(containers: &[Container]) -> Verdict {
    let mut waiting = Vec::new();
    let mut unsure = false;
    for container in containers {
        match container.condition() {
            Condition::Healthy | Condition::Done => {}
            Condition::Runs => unsure = true,
            Condition::NotYet(why) => waiting.push(format!("{}: {why}", container.service())),
            Condition::Failed(why) => {
                return Verdict::Failed {
                    container: container.id.clone(),
                    service: container.service().to_owned(),
                    why,
                };
            }
        }
    }
    if !waiting.is_empty() {
        Verdict::NotYet(waiting.join("; "))
    } else if unsure {
        Verdict::Runs(containers.iter().map(Container::run).collect())
    } else {
        Verdict::Ready
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn container(service: &str, state: &str) -> Container {
        let text = format!(
            r#"{{"Id": "c-{service}", "Name": "/p_{service}_1", "State": {state}, "RestartCount": 0,
                "Config": {{"Labels": {{"com.docker.compose.service": "{service}"}}}}, "More": []}}"#
        );
        serde_json::from_str(&text).unwrap()
    }

    const RUNS: &str = r#"{"Status": "running", "ExitCode": 0, "StartedAt": "1", "Health": null}"#;

    #[test]
    fn a_project_is_ready_when_each_service_is() {
        let healthy = container(
            "db",
            r#"{"Status": "running", "Health": {"Status": "healthy", "Log": null}}"#,
        );
        let done = container("init", r#"{"Status": "exited", "ExitCode": 0}"#);
        assert_eq!(judge(&[healthy.clone(), done.clone()]), Verdict::Ready);
        let Verdict::Runs(first) = judge(&[healthy, container("web", RUNS), done]) else {
            panic!("one without a health check is looked at twice");
        };
        assert_eq!(first.len(), 3);
        let starting =
            container("db", r#"{"Status": "running", "Health": {"Status": "starting"}}"#);
        let created = container("x", r#"{"Status": "created"}"#);
        let both = judge(&[starting, container("web", RUNS), created]);
        assert_eq!(both, Verdict::NotYet("db: its health is starting; x: it is created".into()));
    }

    #[test]
    fn what_failed_is_named_with_what_it_said() {
        for (state, says) in [
            (r#"{"Status": "exited", "ExitCode": 3}"#, "it ended with code 3"),
            (
                r#"{"Status": "exited", "ExitCode": 127, "Error": "no such program"}"#,
                "it ended with code 127: no such program",
            ),
            (
                r#"{"Status": "created", "ExitCode": 127, "Error": "no such program"}"#,
                "it cannot be started: no such program",
            ),
            (
                r#"{"Status": "running", "Health": {"Status": "unhealthy", "Log": [{"Output": "no answer\n"}]}}"#,
                "its health check fails: no answer",
            ),
        ] {
            let verdict = judge(&[container("web", RUNS), container("db", state)]);
            let Verdict::Failed { container, service, why } = verdict else {
                panic!("{verdict:?}")
            };
            assert_eq!((&*container, &*service, &*why), ("c-db", "db", says));
        }
    }

    #[test]
    fn one_that_was_started_anew_is_another_look() {
        let again = container("web", &RUNS.replace("\"1\"", "\"2\""));
        assert_ne!(judge(&[container("web", RUNS)]), judge(&[again]));
    }
}
