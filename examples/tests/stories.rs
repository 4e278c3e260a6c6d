//! The example programs: each a story that checks itself, and cleans up after itself.
#![allow(clippy::unwrap_used, clippy::print_stderr, reason = "tests")]

use std::process::Command;

fn tell(program: &str) {
    let output = Command::new(program).output().unwrap();
    let (said, complained) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} ended as {}:\n{said}{complained}", output.status);
    assert!(said.contains('✓'), "{program} has checked nothing:\n{said}");
}

#[test]
fn an_agent_rewinds_itself() {
    tell(env!("CARGO_BIN_EXE_agent_loop"));
}

#[test]
fn the_best_of_several_forks_is_kept() {
    tell(env!("CARGO_BIN_EXE_best_of_n"));
}

#[test]
fn another_harness_takes_over() {
    tell(env!("CARGO_BIN_EXE_recover"));
}

#[test]
fn a_backend_of_ones_own_is_used_as_any() {
    tell(env!("CARGO_BIN_EXE_custom_backend"));
}

#[test]
fn turns_are_streamed_over_http() {
    tell(env!("CARGO_BIN_EXE_http_harness"));
}

/// A client of the protocol that was written elsewhere; `scripts/setup tests` installs it.
#[test]
fn the_tools_are_driven_over_the_model_context_protocol() {
    let Some(python) = std::env::var_os("SANDBOX_MCP_PYTHON") else {
        eprintln!("skipped: SANDBOX_MCP_PYTHON names no Python with the package `mcp`");
        return;
    };
    let dir = tempfile::Builder::new().prefix("sandbox-test-").tempdir().unwrap();
    let repository = dir.path().join("repository");
    std::fs::create_dir(&repository).unwrap();
    std::fs::write(repository.join("README"), "v1\n").unwrap();
    let state = dir.path().join("state");
    let output = Command::new(python)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/mcp_client.py"))
        .arg(env!("CARGO_BIN_EXE_mcp_server"))
        .arg(&state)
        .current_dir(&repository)
        .output()
        .unwrap();
    for name in ["mcp", "beside"] {
        let destroyed = Command::new(env!("CARGO_BIN_EXE_sandboxer"))
            .args(["destroy", name])
            .env("SANDBOXER_STATE_DIR", &state)
            .output()
            .unwrap();
        assert!(destroyed.status.success() || !output.status.success(), "{name}: {destroyed:?}");
    }
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.matches('✓').count() >= 9, "{said}");
}
