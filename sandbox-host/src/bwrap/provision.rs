//! Making instances, and starting those that stopped.

use std::{io, path::Path};

use jiff::Timestamp;
use rustix::fs::FlockOperation;
use sandbox_core::{Instance, Provision, Result, SnapshotId};

use super::{
    error::{at, blocking},
    instance::{InstanceDir, Marks},
    launch::{self, Made},
    layers, plan,
    process::boot_id,
    shared::Shared,
};

/// A new instance on these layers.
pub(crate) async fn on_layers(
    shared: &Shared,
    request: &Provision,
    layers: Vec<SnapshotId>,
) -> Result<Instance> {
    let (made, dir, marks) = {
        let (shared, request) = (shared.clone(), request.clone());
        blocking("provision", move || make(&shared, request, layers)).await?
    };
    bring_up(shared, made, &dir, marks).await
}

fn make(
    shared: &Shared,
    request: Provision,
    layers: Vec<SnapshotId>,
) -> Result<(Made, InstanceDir, Marks)> {
    const OPERATION: &str = "provision";
    plan::refuse(&request.spec)?;
    launch::guest_limits(shared.available(), &request.spec.limits)?;
    shared.state.prepare()?;
    let marks = Marks {
        created_at: Timestamp::now(),
        run_as: shared.run_as,
        groups: shared.available().plan(&request.instance, &request.spec.limits),
        boot_id: boot_id().map_err(at(OPERATION, Path::new("/proc")))?,
        layers,
        request,
    };
    let lock = shared.state.lock(FlockOperation::LockShared);
    let _lock = lock.map_err(at(OPERATION, &shared.state.root))?;
    layers::check_layers(OPERATION, &shared.state, &marks.layers)?;
    // From before the first file on, so that nothing is left whatever fails.
    let made = Made::instance(shared, &InstanceDir::of(&shared.state, &marks.request.instance));
    let like = layers::topmost(&shared.state, &marks.layers);
    let dir = InstanceDir::create(&shared.state, &marks, &like)?;
    Ok((made, dir, marks))
}

async fn bring_up(
    shared: &Shared,
    made: Made,
    dir: &InstanceDir,
    marks: Marks,
) -> Result<Instance> {
    let (made, guest) = launch::launch(shared, dir, &marks, made).await?;
    let instance = dir.describe(&marks, Some(&guest))?;
    made.keep();
    Ok(instance)
}

/// A new guest on the files of an instance that does not run.
pub(crate) async fn start_again(
    shared: &Shared,
    dir: &InstanceDir,
    mut marks: Marks,
    request: &Provision,
) -> Result<Instance> {
    const OPERATION: &str = "start";
    let mut request = request.clone();
    request.instance = dir.id.clone();
    let marks = {
        let (shared, dir) = (shared.clone(), dir.clone());
        blocking(OPERATION, move || {
            launch::guest_limits(shared.available(), &request.spec.limits)?;
            let now = boot_id().map_err(at(OPERATION, Path::new("/proc")))?;
            if marks.boot_id != now {
                tracing::warn!(
                    instance = %dir.id,
                    "the host was restarted since this instance ran; what it wrote last may be lost"
                );
            }
            let adopted = layers::adopt_sealed(&shared.state, &dir, &mut marks)?;
            marks.boot_id = now;
            marks.groups = shared.available().plan(&dir.id, &request.spec.limits);
            marks.request = request;
            let renew = || {
                match std::fs::remove_file(dir.info()) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
                dir.write_marks(&marks)?;
                if adopted {
                    dir.renew_upper(marks.run_as, &layers::topmost(&shared.state, &marks.layers))?;
                }
                dir.renew_work(marks.run_as)
            };
            renew().map_err(at(OPERATION, &dir.fs()))?;
            Ok(marks)
        })
        .await?
    };
    bring_up(shared, Made::guest(shared, dir), dir, marks).await
}
