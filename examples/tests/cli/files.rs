//! A sandbox's files.

use serde_json::json;

use crate::support::on_each;

#[test]
fn files_are_printed_and_listed_and_changes_told() {
    on_each(|cli| {
        cli.create("main", &[]);
        assert_eq!(cli.run(&["cat", "main", "README"]).stdout, "v1\n");
        let said = cli.fails(1, &["cat", "main", "nope"]);
        assert!(said.contains("nope"), "{said}");
        cli.sh(
            "main",
            "printf '\\377\\000' > raw; ln -s README link; rm notes.txt; echo v2 > README",
        );
        let output = cli.run_with(&["cat", "main", "raw"], b"");
        assert_eq!(output.stdout, b"\xff\x00");
        let listed = cli.json(&["ls", "main"]);
        let names: Vec<&str> =
            listed.as_array().unwrap().iter().filter_map(|entry| entry["name"].as_str()).collect();
        assert_eq!(names, ["README", "link", "raw", "src"]);
        assert_eq!(listed[1]["target"], "README");
        assert_eq!(listed[3]["kind"], "directory");
        let changes = cli.json(&["changes", "main"]);
        let told = |path: &str| {
            let all = changes.as_array().unwrap();
            all.iter().find(|change| change["path"] == path).map(|change| change["kind"].clone())
        };
        assert_eq!(told("/workspace/README"), Some(json!("modified")));
        assert_eq!(told("/workspace/raw"), Some(json!("added")));
        assert_eq!(told("/workspace/notes.txt"), Some(json!("deleted")));
        assert_eq!(told("/workspace/src/main.c"), None);
        assert_eq!(std::fs::read(cli.repo().join("README")).unwrap(), b"v1\n");
    });
}
