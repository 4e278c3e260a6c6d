//! Processes that go on by themselves.

use crate::support::on_each;

#[test]
fn another_process_finds_reads_and_waits_for_it() {
    on_each(|cli| {
        cli.create("main", &[]);
        let text =
            "echo begun; echo oh >&2; while [ ! -e go ]; do sleep 0.05; done; echo done; exit 5";
        let spawned = cli.json(&["spawn", "main", "--", "sh", "-c", text]);
        let process = spawned["process_id"].as_str().unwrap();
        cli.until("its first words", || {
            let said = cli.run(&["logs", "main", process]);
            assert_eq!(said.code, 0, "{said:?}");
            (said.stdout.as_str(), said.stderr.as_str()) == ("begun\n", "oh\n")
        });
        let listed = cli.json(&["ps", "main"]);
        assert_eq!(listed[0]["process_id"], process);
        assert_eq!(listed[0]["running"], true);
        assert_eq!(listed[0]["detached"], true);
        assert_eq!(cli.json(&["get", "main"])["state"], "active");

        let follower = cli.start(&["logs", "main", process, "--follow", "--offset", "3"]);
        cli.sh("main", "touch go");
        let waited = cli.json(&["wait", "main", process]);
        assert_eq!(waited["exit_code"], 5);
        let followed = crate::support::said(&follower.wait_with_output().unwrap());
        assert_eq!(followed.stdout, "un\ndone\n", "{followed:?}");
        assert_eq!(cli.run(&["logs", "main", process, "--offset", "6"]).stdout, "done\n");
        assert_eq!(cli.json(&["wait", "main", process])["exit_code"], 5, "also later");
        assert_eq!(cli.json(&["get", "main"])["state"], "ready");
        assert_eq!(cli.json(&["ps", "main"])[0]["exit_code"], 5);
    });
}

#[test]
fn it_is_killed_and_signalled() {
    on_each(|cli| {
        cli.create("main", &[]);
        let text = "trap 'echo hup' HUP; echo ready; while :; do sleep 0.05; done";
        let spawned = cli.json(&["spawn", "main", "--", "sh", "-c", text]);
        let process = spawned["process_id"].as_str().unwrap();
        let said = |what: &'static str| {
            cli.until(what, || cli.run(&["logs", "main", process]).stdout.contains(what));
        };
        said("ready");
        cli.json(&["kill", "main", process, "--signal", "HUP"]);
        said("hup");
        cli.fails(2, &["kill", "main", process, "--signal", "NOPE"]);
        cli.json(&["kill", "main", process]);
        assert_eq!(cli.json(&["wait", "main", process])["outcome"], "cancelled");
        cli.json(&["kill", "main", process]);
        cli.fails(1, &["wait", "main", "prc_00000000000000000000000000000000"]);
    });
}
