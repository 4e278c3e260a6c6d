//! A state directory with a long past: whoever opens it looks at what lives, and only at that.

use std::{
    fs,
    io::{BufWriter, Write},
    time::Instant,
};

use libtest_mimic::Trial;
use sandbox_conformance::{Check, holds, same};
use sandbox_core::{
    BackendId, Consumer, CreateSandbox, EventId, Instance, InstanceId, Known, SandboxEvent,
    SandboxId, SandboxSpec,
};

use crate::{scene::Scene, trial};

const SANDBOXES: usize = 10_000;
const RECORDS: usize = 20;
const LIVE: usize = 5;

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("many::ended_sandboxes_are_not_read", ended_sandboxes_are_not_read)]
}

async fn ended_sandboxes_are_not_read() -> Check<Option<String>> {
    let scene = Scene::new()?;
    // Makes the directories, and the owner's mark.
    scene.manager().await?;
    let spec = CreateSandbox::new().spec;
    let mut ids = Vec::new();
    for n in 0..SANDBOXES {
        let id = SandboxId::new();
        write(&scene, &id, &spec, n < LIVE)?;
        ids.push(id);
    }
    let begin = Instant::now();
    let manager = scene.manager().await?;
    let built = begin.elapsed();
    let begin = Instant::now();
    let listed = manager.list().await?;
    println!(
        "{SANDBOXES} sandboxes, {LIVE} live: built in {built:?}, listed in {:?}",
        begin.elapsed()
    );
    same!(listed.iter().map(|info| info.sandbox_id.clone()).collect::<Vec<_>>(), &ids[..LIVE]);
    let begin = Instant::now();
    same!(scene.manager().await?.list_all().await?.len(), SANDBOXES);
    println!("all listed in {:?}", begin.elapsed());

    // What cannot be read at all is not in the way of whoever does not need it.
    for id in &ids[LIVE..] {
        fs::write(scene.journal_dir().join(format!("history/{id}.jsonl")), "no record\n")?;
    }
    let manager = scene.manager().await?;
    same!(manager.list().await?.len(), LIVE);
    same!(manager.list_all().await?.len(), LIVE);
    let error = manager.open(ids[LIVE].as_str()).await.err().ok_or("it was opened")?;
    let place = format!("{}.jsonl, line 1", ids[LIVE]);
    holds!(error.to_string().contains(&place), "{error} names the place");
    Ok(None)
}

/// A sandbox's history of so many records; a live one is stopped, so that nobody looks for its instance.
fn write(scene: &Scene, id: &SandboxId, spec: &SandboxSpec, live: bool) -> Check {
    let instance = Instance {
        id: InstanceId::new(),
        sandbox: id.clone(),
        backend: BackendId::new("bwrap"),
        data: serde_json::Value::Null,
    };
    let mut kinds = vec![
        Known::Requested { name: None, spec: spec.clone(), from: None },
        Known::Provisioning {
            backend: instance.backend.clone(),
            instance: instance.id.clone(),
            generation: 1,
        },
        Known::Ready { instance, generation: 1, reachability: None, expires_at: None },
    ];
    while kinds.len() < RECORDS - 2 {
        let path = format!("/workspace/{}", kinds.len());
        kinds.push(Known::FileOperation { operation: "write".into(), path });
    }
    kinds.extend(if live {
        [Known::StopRequested, Known::Stopped]
    } else {
        [Known::Destroying, Known::Destroyed]
    });
    let path = scene.journal_dir().join(format!("history/{id}.jsonl"));
    let mut file = BufWriter::new(fs::File::create(path)?);
    for (kind, seq) in kinds.into_iter().zip(1..) {
        let event = SandboxEvent {
            id: EventId::new(),
            sandbox_id: id.clone(),
            seq,
            at: jiff::Timestamp::now(),
            turn: None,
            consumer: Consumer::default(),
            kind: kind.into(),
        };
        serde_json::to_writer(&mut file, &event)?;
        file.write_all(b"\n")?;
    }
    file.flush()?;
    if live {
        fs::File::create(scene.journal_dir().join("live").join(id.as_str()))?;
    }
    Ok(())
}
