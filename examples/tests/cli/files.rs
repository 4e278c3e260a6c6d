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

#[test]
fn files_and_trees_are_copied_in_and_out() {
    on_each(|cli| {
        cli.create("main", &[]);
        let (up, down) = (cli.path("up"), cli.path("down"));
        std::fs::create_dir_all(up.join("deep/er")).unwrap();
        std::fs::write(up.join("deep/er/file"), [0xff, 0, 7]).unwrap();
        std::os::unix::fs::symlink("deep/er/file", up.join("link")).unwrap();
        let (up, down) = (up.to_str().unwrap(), down.to_str().unwrap());
        let copied = cli.json(&["cp", up, "main:tree"]);
        assert_eq!(copied["bytes"], 3);
        assert_eq!(
            cli.sh("main", "readlink tree/link; wc -c < tree/deep/er/file"),
            "deep/er/file\n3"
        );
        cli.json(&["cp", "main:/workspace/tree", down]);
        assert_eq!(std::fs::read(cli.path("down/link")).unwrap(), [0xff, 0, 7]);
        cli.json(&["cp", &format!("{up}/deep/er/file"), "main:one"]);
        let one = cli.path("one");
        cli.json(&["cp", "main:one", one.to_str().unwrap()]);
        assert_eq!(std::fs::read(one).unwrap(), [0xff, 0, 7]);

        cli.fails(2, &["cp", up, down]);
        cli.fails(2, &["cp", "main:a", "main:b"]);
        let said = cli.fails(1, &["cp", "main:nope", cli.path("x").to_str().unwrap()]);
        assert!(said.contains("nope"), "{said}");
        cli.sh("main", "mkdir out; ln -s /etc/passwd out/link");
        cli.fails(1, &["cp", "main:out", cli.path("out").to_str().unwrap()]);
        assert!(!cli.path("out").exists());
        // Larger than what is read at once.
        cli.sh("main", "head -c 100000000 /dev/zero > big");
        assert_eq!(cli.run(&["cat", "main", "big"]).stdout.len(), 100_000_000);
    });
}
