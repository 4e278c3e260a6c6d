//! What there is to make sandboxes with, and the command line itself.

use std::fs;

use crate::support::{Cli, backends};

#[test]
fn backends_tell_their_evidence() {
    let cli = Cli::new("ext.bwrap");
    let told = cli.probes();
    for backend in backends() {
        let mine = told.as_array().unwrap().iter().find(|b| b["extension_id"] == backend).unwrap();
        assert_eq!(mine["available"], true, "{mine}");
        assert!(mine["features"]["network_deny"]["evidence"].is_string(), "{mine}");
    }
}

#[test]
fn profiles_are_listed_and_checked() {
    let cli = Cli::new("ext.bwrap");
    let listed = cli.json(&["profiles", "list"]);
    assert_eq!(listed.as_array().unwrap().len(), 6);
    let (good, bad) = (cli.path("good.yaml"), cli.path("bad.yaml"));
    let text = "id: profile.x\nversion: \"1\"\nextension: ext.bwrap\n";
    fs::write(&good, text).unwrap();
    fs::write(&bad, format!("{text}colour: red\n")).unwrap();
    let (good, bad) = (good.to_string_lossy(), bad.to_string_lossy());
    assert_eq!(cli.json(&["profiles", "check", &good])[0]["valid"], true);
    let said = cli.run(&["profiles", "check", &good, &bad]);
    assert_eq!(said.code, 1);
    let told: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
    let error = told[1]["error"].as_str().unwrap();
    assert!(error.contains("bad.yaml:4: ") && error.contains("colour"), "{error}");
    let dir = cli.path("").to_string_lossy().into_owned();
    let said = cli.run(&["--profiles-dir", &dir, "profiles", "list"]);
    assert_eq!(said.code, 1, "a directory with a bad one is refused: {said:?}");
}

#[test]
fn what_is_not_understood_exits_with_2() {
    let cli = Cli::new("ext.bwrap");
    for args in
        [&["frobnicate"][..], &["get"], &["create", "--ttl", "soon"], &["create", "--actor", "x"]]
    {
        cli.fails(2, args);
    }
    cli.fails(2, &["create", "--input", "novalue"]);
    assert_eq!(cli.run(&["--help"]).code, 0);
    assert!(cli.run(&["exec", "--help"]).stdout.contains("Examples:"));
}

#[test]
fn shells_get_completions() {
    let cli = Cli::new("ext.bwrap");
    for shell in ["bash", "zsh", "fish"] {
        let said = cli.run(&["completions", shell]);
        assert_eq!(said.code, 0);
        assert!(said.stdout.contains("extend-ttl"), "{shell}");
    }
}

#[test]
fn progress_is_plain_lines_where_there_is_no_terminal() {
    let cli = Cli::new("ext.bwrap");
    let said = cli.run(&["create", "--name", "main"]);
    assert_eq!(said.code, 0);
    assert!(said.stderr.contains("sandboxer: making an instance on bwrap\n"), "{said:?}");
    assert!(!said.stderr.contains('\u{1b}'), "{said:?}");
    let said = cli.run(&["--quiet", "snapshot", "main"]);
    assert_eq!((said.code, said.stderr.as_str()), (0, ""), "{said:?}");
}
