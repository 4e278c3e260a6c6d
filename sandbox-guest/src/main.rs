//! The guest program: what runs inside a sandbox, speaks to the harness, and starts its processes.

mod program;

fn main() -> std::process::ExitCode {
    program::main()
}
