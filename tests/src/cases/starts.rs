//! What a process is started with, and what cannot be started.

use std::{ffi::OsString, os::unix::ffi::OsStringExt};

use sandbox_core::{Command, ErrorKind, WORKSPACE};

use super::cases;
use crate::{Check, Context, context::error_of, holds, same};

cases!("starts";
    [] arguments_arrive_as_they_are,
    [] an_argument_of_120_kib_arrives,
    [] the_environment_arrives_as_it_is,
    [] a_cleared_environment_has_nothing_else,
    [] the_environment_of_the_spec_is_in_every_process,
    [] relative_directories_begin_at_the_workspace,
    [] a_missing_program_is_not_found,
    [] a_program_that_cannot_be_executed_is_a_denied_permission,
    [] a_missing_directory_is_not_found,
    [] an_unknown_user_is_not_found,
    [Users] a_command_runs_as_the_user_that_it_names,
    [] what_linux_does_not_take_is_an_error,
    [] a_file_without_an_interpreter_line_is_no_shell_script,
);

fn bytes(bytes: &[u8]) -> OsString {
    OsString::from_vec(bytes.to_vec())
}

async fn arguments_arrive_as_they_are(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let words: Vec<OsString> = [
        &b"plain"[..],
        b"",
        b"two  words",
        b" ",
        b"a'quote\"and`tick",
        b"new\nline\n",
        b"tab\tcr\r",
        b"$HOME ${PATH} $(id) \\n",
        b"* ? [a-z] ~ ; & | < > !",
        b"-rf",
        b"--",
        b"\xff\xfe\x80 not utf-8",
        "\u{e4}\u{4e2d}\u{1f600}".as_bytes(),
        b"",
    ]
    .map(bytes)
    .to_vec();
    let run = cx.run(&sandbox, Command::new("printf").arg("%s\\0").args(&words)).await?;
    let expected: Vec<u8> =
        words.into_iter().flat_map(|word| [word.into_vec(), vec![0]].concat()).collect();
    same!(run.stdout.head, expected);
    // A program whose name needs as much care.
    let name = bytes(b"-odd $name \xff");
    let files = sandbox.files();
    files.write(&name, "#!/bin/sh\necho \"$1\"\n", &cx.sink).await?;
    files.set_mode(&name, 0o755, &cx.sink).await?;
    let path = [bytes(b"./"), name].join(&OsString::new());
    let run = cx.run(&sandbox, Command::new(path).arg("-n")).await?;
    holds!(run.outcome.is_success(), "{:?} is success: {}", run.outcome, run.stderr.text());
    Ok(())
}

async fn an_argument_of_120_kib_arrives(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let long: String = (0..120 * 1024).map(|n| char::from(b'a' + (n % 26) as u8)).collect();
    let run = cx.run(&sandbox, Command::new("printf").args(["%s", &long])).await?;
    same!(run.stdout.total, long.len() as u64);
    holds!(run.stdout.head == long.as_bytes(), "it is the same");
    Ok(())
}

async fn the_environment_arrives_as_it_is(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let command = Command::new("env")
        .arg("-0")
        .env_clear()
        .env("EMPTY", "")
        .env("EQUALS", "a=b=c")
        .env("LINES", "one\ntwo\n")
        .env("QUOTES", "'\"`$HOME\\")
        .env("BYTES", bytes(b"\xff\x01"))
        .env(bytes(b"N\xff"), "odd name")
        .env("TWICE", "first")
        .env("TWICE", "second");
    let run = cx.run(&sandbox, command).await?;
    let mut found: Vec<&[u8]> = run.stdout.head.split(|byte| *byte == 0).collect();
    found.retain(|variable| !variable.is_empty());
    found.sort_unstable();
    let mut expected: Vec<&[u8]> = vec![
        b"EMPTY=",
        b"EQUALS=a=b=c",
        b"LINES=one\ntwo\n",
        b"QUOTES='\"`$HOME\\",
        b"BYTES=\xff\x01",
        b"N\xff=odd name",
        b"TWICE=second",
    ];
    expected.sort_unstable();
    same!(found, expected);
    Ok(())
}

async fn a_cleared_environment_has_nothing_else(cx: &Context) -> Check {
    let sandbox = cx.manager.create(cx.request().env("SPEC", "1"), &cx.sink).await?;
    let run = cx.run(&sandbox, Command::new("env").env("OLD", "1").env_clear()).await?;
    same!(run.stdout.text(), "");
    same!(cx.sh(&sandbox, "echo $SPEC; [ -n \"$PATH\" ] && echo path").await?, "1\npath");
    Ok(())
}

async fn the_environment_of_the_spec_is_in_every_process(cx: &Context) -> Check {
    let request = cx.request().env("SPEC", "a b").env("OTHER", "1");
    let sandbox = cx.manager.create(request, &cx.sink).await?;
    same!(cx.sh(&sandbox, "echo \"$SPEC\" $OTHER").await?, "a b 1");
    let command = Command::shell("echo $SPEC $OTHER").env("OTHER", "2");
    same!(cx.run(&sandbox, command).await?.stdout.text(), "a b 2\n");
    Ok(())
}

async fn relative_directories_begin_at_the_workspace(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    let workspace = cx.sh(&sandbox, "pwd -P").await?;
    if cx.has(sandbox_core::Feature::ProcessIsolation) {
        same!(workspace, WORKSPACE);
        same!(sandbox.info().await?.workspace.to_string_lossy(), WORKSPACE);
    }
    for (dir, expected) in [
        ("src".to_owned(), format!("{workspace}/src")),
        (".".to_owned(), workspace.clone()),
        ("/".to_owned(), "/".to_owned()),
        (format!("{workspace}/src"), format!("{workspace}/src")),
    ] {
        let run = cx.run(&sandbox, Command::shell("pwd -P").current_dir(dir)).await?;
        same!(run.stdout.text().trim_end(), expected);
    }
    let run = cx.run(&sandbox, Command::new("./run.sh")).await?;
    same!(run.stdout.text(), "ran\n");
    let run = cx.run(&sandbox, Command::new("../run.sh").current_dir("src")).await?;
    same!(run.stdout.text(), "ran\n");
    Ok(())
}

async fn refused(cx: &Context, command: Command, kind: ErrorKind, says: &str) -> Check {
    let sandbox = match cx.manager.list().await?.pop() {
        Some(info) => cx.manager.open(info.sandbox_id.as_str()).await?,
        None => cx.sandbox().await?,
    };
    let shown = format!("{command:?}");
    let error = match cx.run(&sandbox, command).await {
        Ok(run) => return Err(format!("{shown} ended as {:?}", run.outcome).into()),
        Err(error) => error,
    };
    holds!(error.kind() == kind, "{error:?} is {kind:?} ({shown})");
    holds!(error.to_string().contains(says), "{error} names {says:?}");
    holds!(error.sandbox() == Some(sandbox.id()), "{error} names the sandbox");
    // And the sandbox is none the worse for it.
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    Ok(())
}

async fn a_missing_program_is_not_found(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "printf '#!/no/such/interpreter\\n' > lost; chmod 755 lost").await?;
    for program in
        ["no-such-program", "./no-such-program", "/no/such/program", "README/x", "./lost"]
    {
        let kind = if program == "README/x" { None } else { Some(ErrorKind::NotFound) };
        match kind {
            Some(kind) => refused(cx, Command::new(program), kind, program).await?,
            None => {
                error_of(cx.run(&sandbox, Command::new(program)).await)?;
            }
        }
    }
    // What a shell does not find is the shell's affair.
    let run = cx.run(&sandbox, Command::shell("no-such-program")).await?;
    same!(run.outcome.code(), Some(127));
    Ok(())
}

async fn a_program_that_cannot_be_executed_is_a_denied_permission(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "printf '\\177ELF garbage' > garbage; chmod 755 garbage").await?;
    for program in ["./README", "./src", "./garbage"] {
        refused(cx, Command::new(program), ErrorKind::PermissionDenied, program).await?;
    }
    Ok(())
}

async fn a_missing_directory_is_not_found(cx: &Context) -> Check {
    let command = |dir: &str| Command::new("true").current_dir(dir);
    refused(cx, command("no/such/dir"), ErrorKind::NotFound, "no/such/dir").await?;
    refused(cx, command("/no/such/dir"), ErrorKind::NotFound, "/no/such/dir").await?;
    refused(cx, command("README"), ErrorKind::Conflict, "README").await?;
    Ok(())
}

async fn an_unknown_user_is_not_found(cx: &Context) -> Check {
    let command = Command::new("id").user("no-such-user");
    refused(cx, command, ErrorKind::NotFound, "no-such-user").await?;
    let command = Command::new("id").user("0:no-such-group");
    refused(cx, command, ErrorKind::NotFound, "no-such-group").await
}

async fn a_command_runs_as_the_user_that_it_names(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    for (user, expected) in [("1234:5678", "1234 5678"), ("0:0", "0 0")] {
        let command = Command::shell("echo $(id -u) $(id -g)").user(user);
        same!(cx.run(&sandbox, command).await?.stdout.text().trim(), expected);
    }
    Ok(())
}

async fn what_linux_does_not_take_is_an_error(cx: &Context) -> Check {
    let long = "x".repeat(256 * 1024);
    refused(cx, Command::new("true").arg(&long), ErrorKind::LimitExceeded, "true").await?;
    let sandbox = cx.sandbox().await?;
    for command in
        [Command::new(""), Command::new("true").arg("a\0b"), Command::new("x").env("A=", "")]
    {
        same!(error_of(cx.run(&sandbox, command).await)?.kind(), ErrorKind::InvalidSpec);
    }
    Ok(())
}

async fn a_file_without_an_interpreter_line_is_no_shell_script(cx: &Context) -> Check {
    let sandbox = cx.sandbox().await?;
    cx.sh(&sandbox, "echo 'echo ran' > script; chmod 755 script").await?;
    refused(cx, Command::new("./script"), ErrorKind::PermissionDenied, "./script").await?;
    same!(cx.sh(&sandbox, "sh ./script").await?, "ran");
    Ok(())
}
