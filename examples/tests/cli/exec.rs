//! Running commands.

use std::{
    io::Read,
    process::{Command, Stdio},
};

use serde_json::json;

use crate::support::{on_each, said};

#[test]
fn it_exits_as_the_command_does() {
    on_each(|cli| {
        cli.create("main", &[]);
        for (code, argv) in [
            (0, &["true"][..]),
            (3, &["sh", "-c", "exit 3"]),
            (255, &["sh", "-c", "exit 255"]),
            (128 + 15, &["sh", "-c", "kill -TERM $$"]),
            (127, &["no-such-program"]),
            (126, &["./notes.txt"]),
        ] {
            let said = cli.run(&[&["exec", "main", "--"], argv].concat());
            assert_eq!(said.code, code, "{argv:?}: {said:?}");
        }
        let slow = ["exec", "main", "--timeout", "1s", "--", "sh", "-c", "echo so far; sleep 600"];
        let said = cli.run(&slow);
        assert_eq!((said.code, said.stdout.as_str()), (124, "so far\n"), "{said:?}");
        cli.fails(125, &["exec", "nobody", "--", "true"]);
        cli.fails(2, &["exec", "main"]);
        cli.fails(2, &["exec", "main", "--env", "novalue", "--", "true"]);
    });
}

#[test]
fn output_is_passed_on_apart_and_arguments_as_they_are() {
    on_each(|cli| {
        cli.create("main", &[]);
        let said = cli.run(&["exec", "main", "--", "sh", "-c", "echo out; echo err >&2"]);
        assert_eq!((said.stdout.as_str(), said.stderr.as_str()), ("out\n", "err\n"));
        let said = cli.run(&["exec", "main", "--", "printf", "%s|", "a b", "$HOME", "--json", ""]);
        assert_eq!(said.stdout, "a b|$HOME|--json||");
        let said = cli.run(&[
            "exec",
            "main",
            "--cwd",
            "src",
            "--env",
            "A=1=2",
            "--",
            "sh",
            "-c",
            "basename $PWD; echo $A",
        ]);
        assert_eq!(said.stdout, "src\n1=2\n");
        let many = cli.run(&["exec", "main", "--", "sh", "-c", "seq 200000"]);
        assert_eq!(many.stdout.lines().count(), 200_000);
    });
}

#[test]
fn standard_input_is_passed_on_both_ways_at_once() {
    on_each(|cli| {
        cli.create("main", &[]);
        // More than all buffers on the way together hold.
        let input: Vec<u8> = (0..16 * 1024 * 1024_u32).map(|n| (n % 251) as u8).collect();
        let output = cli.run_with(&["exec", "main", "--stdin", "--", "cat"], &input);
        assert!(output.status.success());
        assert!(output.stdout == input, "{} bytes came back", output.stdout.len());
        // One that reads nothing ends all the same, and without --stdin there is none.
        let output = cli.run_with(&["exec", "main", "--stdin", "--", "true"], &input);
        assert_eq!(output.status.code(), Some(0));
        let output = cli.run_with(&["exec", "main", "--", "wc", "-c"], b"unread");
        assert_eq!(said(&output).stdout.trim(), "0");
    });
}

#[test]
fn the_outcome_is_one_document() {
    on_each(|cli| {
        cli.create("main", &[]);
        let said = cli.run(&[
            "exec",
            "main",
            "--json",
            "--",
            "sh",
            "-c",
            "echo hi; printf '\\377' >&2; exit 4",
        ]);
        assert_eq!(said.code, 4);
        let told: serde_json::Value = serde_json::from_str(&said.stdout).unwrap();
        assert_eq!(told["exit_code"], 4);
        assert_eq!(told["outcome"], json!({"exited": 4}));
        assert_eq!((&told["stdout"], &told["stdout_encoding"]), (&json!("hi\n"), &json!("utf8")));
        assert_eq!((&told["stderr"], &told["stderr_encoding"]), (&json!("/w=="), &json!("base64")));
        let output = cli.run_with(&["exec", "main", "--json", "--stdin", "--", "cat"], b"fed");
        let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(told["stdout"], "fed");
    });
}

#[test]
fn a_terminal_is_one() {
    on_each(|cli| {
        cli.create("main", &[]);
        let said = cli.run(&["exec", "main", "--tty", "--", "sh", "-c", "test -t 1 && stty size"]);
        assert_eq!((said.code, said.stdout.trim()), (0, "24 80"), "{said:?}");
        let said = cli.run(&["exec", "main", "--", "sh", "-c", "test -t 1"]);
        assert_eq!(said.code, 1);
    });
}

#[test]
fn interrupting_it_kills_what_it_started() {
    on_each(|cli| {
        cli.create("main", &[]);
        let text = "sleep 86399 & echo started; wait";
        let mut child = cli.start(&["exec", "main", "--", "sh", "-c", text]);
        let mut first = [0; 8];
        child.stdout.as_mut().unwrap().read_exact(&mut first).unwrap();
        assert_eq!(&first, b"started\n");
        let pid = child.id().to_string();
        assert!(
            Command::new("kill")
                .args(["-INT", &pid])
                .stdout(Stdio::null())
                .status()
                .unwrap()
                .success()
        );
        assert_eq!(child.wait().unwrap().code(), Some(130));
        let left = "grep -als '[s]leep.86399' /proc/[0-9]*/cmdline | wc -l";
        cli.until("the end of all that it started", || cli.sh("main", left) == "0");
        let history = cli.run(&["history", "main"]).stdout;
        assert!(history.contains("\"cancelled\""), "{history}");
    });
}
