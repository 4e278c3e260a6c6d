//! Filesystem states.

use serde_json::json;

use crate::support::on_each;

#[test]
fn snapshots_are_taken_listed_rewound_to_forked_and_removed() {
    on_each(|cli| {
        let id = cli.create("main", &[])["sandbox_id"].clone();
        cli.sh("main", "echo one > file");
        let first = cli.json(&["snapshot", "main", "--label", "the first"]);
        let a = first["snapshot_id"].as_str().unwrap();
        assert_eq!(first["label"], "the first");
        cli.sh("main", "echo two > file");
        let second = cli.json(&["snapshot", "main"]);
        let b = second["snapshot_id"].as_str().unwrap();
        assert_eq!(second["parent"], a);

        let listed = cli.json(&["snapshots", "list", "main"]);
        assert_eq!((&listed[0]["snapshot_id"], &listed[1]["snapshot_id"]), (&json!(a), &json!(b)));
        assert_eq!(listed[1]["current"], true);
        assert_eq!(cli.json(&["snapshots", "list"]), listed);
        assert!(cli.json(&["snapshots", "get", a])["size"].as_u64().is_some());
        assert!(!cli.json(&["changes", "main", a]).as_array().unwrap().is_empty());

        let rewound = cli.json(&["rewind", "main", a]);
        assert_eq!((&rewound["generation"], &rewound["sandbox_id"]), (&json!(2), &id));
        assert_eq!(cli.sh("main", "cat file"), "one");
        let fork = cli.json(&["fork", b, "--name", "variant"]);
        assert_ne!(fork["sandbox_id"], id);
        assert_eq!(cli.sh("variant", "cat file"), "two");
        assert_eq!(cli.json(&["restore", b])["sandbox_id"], id);
        assert_eq!(cli.sh("main", "cat file"), "two");

        let said = cli.fails(1, &["snapshots", "delete", b]);
        assert!(said.contains("runs from"), "{said}");
        assert_eq!(cli.json(&["snapshots", "delete", a])["deleted"], true);
        cli.fails(1, &["snapshots", "get", a]);
        cli.fails(2, &["rewind", "main", "not-an-id"]);
        cli.fails(1, &["rewind", "main", a]);
    });
}

#[test]
fn a_workspace_is_exported_and_imported() {
    on_each(|cli| {
        cli.create("main", &[]);
        cli.sh("main", "echo moved > file; ln -s file link");
        let snapshot = cli.json(&["snapshot", "main"]);
        let archive = cli.path("archive");
        let archive = archive.to_str().unwrap();
        let id = snapshot["snapshot_id"].as_str().unwrap();
        let exported = cli.json(&["export", id, "--output", archive]);
        assert_eq!(exported["bytes"], std::fs::metadata(archive).unwrap().len());
        let on = cli.on();
        let mut import = vec!["import", archive, "--name", "copy"];
        import.extend(on.iter().map(String::as_str));
        assert_eq!(cli.json(&import)["name"], "copy");
        assert_eq!(cli.sh("copy", "cat file; readlink link; cat README"), "moved\nfile\nv1");
        cli.fails(1, &["import", cli.repo().join("README").to_str().unwrap()]);
        assert_eq!(
            cli.json(&["list"]).as_array().unwrap().len(),
            2,
            "nothing is left of what failed"
        );
    });
}
