//! A directory of this host that is a workspace itself: it was here before, and stays.

use std::{io, path::Path};

use sandbox_core::{Error, ErrorKind, Provision, Result, WorkspaceMode};

use crate::error::at;

const OPERATION: &str = "bind the workspace";

/// The request with that directory's real path, if it has one.
///
/// # Errors
///
/// `NotFound` if it is not there; `InvalidSpec` if it is no directory, or if whoever can write to it could
/// change what is kept of other sandboxes.
pub(super) fn resolved(state: &Path, mut request: Provision) -> Result<Provision> {
    let spec = &mut request.spec;
    let (WorkspaceMode::Bind, Some(workspace)) = (spec.workspace_mode, &spec.workspace) else {
        return Ok(request);
    };
    let shown = workspace.display();
    let invalid = |why: &str| {
        let message = format!("the workspace {shown} cannot be bound: {why}");
        Error::new(ErrorKind::InvalidSpec, OPERATION, message)
    };
    let real = workspace.canonicalize().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let message = format!(
                "there is no directory {shown}; a workspace that stays on its host has to be there before"
            );
            Error::new(ErrorKind::NotFound, OPERATION, message)
        }
        _ => at(OPERATION, workspace)(error),
    })?;
    if !real.is_dir() {
        return Err(invalid("it is not a directory"));
    }
    let state = state.canonicalize().map_err(at(OPERATION, state))?;
    if real.starts_with(&state) || state.starts_with(&real) {
        let why =
            format!("all sandboxes are kept in {}, out of reach of each of them", state.display());
        return Err(invalid(&why));
    }
    spec.workspace = Some(real);
    Ok(request)
}

#[cfg(test)]
mod tests {
    use sandbox_core::{CreateSandbox, OwnerId, SandboxId};

    use super::*;

    #[test]
    fn only_a_directory_that_is_there_and_nobodys_state_is_bound() {
        let place = tempfile::tempdir().unwrap();
        let place = place.path().canonicalize().unwrap();
        let state = place.join("state");
        for dir in ["state/sources", "app"] {
            std::fs::create_dir_all(place.join(dir)).unwrap();
        }
        std::fs::write(place.join("file"), "").unwrap();
        std::os::unix::fs::symlink("app", place.join("link")).unwrap();
        let bind = |name: &str| {
            let spec = CreateSandbox::new().bind_workspace(place.join(name)).spec;
            resolved(&state, Provision::new(SandboxId::new(), OwnerId::new(), spec))
        };
        assert_eq!(bind("link").unwrap().spec.workspace, Some(place.join("app")));
        for (name, kind, says) in [
            ("nothing", ErrorKind::NotFound, "no directory"),
            ("file", ErrorKind::InvalidSpec, "not a directory"),
            ("state/sources", ErrorKind::InvalidSpec, "are kept in"),
            ("", ErrorKind::InvalidSpec, "are kept in"),
        ] {
            let error = bind(name).unwrap_err();
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(says), "{error}");
        }
    }
}
