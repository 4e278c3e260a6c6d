//! Sandboxes that profiles describe.

use std::time::Duration;

use sandbox_core::{
    CreateSandbox, EnvSecrets, ErrorKind, Feature, NetworkDefault, Period, Profile, ProfileCatalog,
    SandboxManager,
};

use super::cases;
use crate::{Check, Context, context::error_of, holds, same};

cases!("profiles";
    [] a_profile_fills_in_what_the_request_leaves_open,
    [] a_ttl_is_capped_and_counts_from_ready,
    [] acquiring_by_profile_twice_gives_the_same_sandbox,
    [] what_cannot_be_enforced_is_refused_before_anything_is_made,
    [] an_unknown_profile_is_named,
);

/// A catalogue of one profile of this backend, and a manager with it.
async fn manager(cx: &Context, rest: &str) -> Check<SandboxManager> {
    let network = if cx.has(Feature::NetworkDeny) { "deny" } else { "allow" };
    let text = format!(
        "id: profile.case\nversion: \"1.0.0\"\nextension: ext.{}\nnetwork: {{default: {network}}}\n{rest}",
        cx.backend.id()
    );
    let catalog = ProfileCatalog::none().with(Profile::from_yaml(&text, "case.yaml")?);
    Ok(cx.manager_with_profiles(catalog, EnvSecrets).await?)
}

fn request(cx: &Context) -> CreateSandbox {
    CreateSandbox::profile("profile.case").input("repo", cx.repository().to_string_lossy())
}

async fn a_profile_fills_in_what_the_request_leaves_open(cx: &Context) -> Check {
    let manager = manager(cx, "ttl: {default: 2h, max: 4h}\n").await?;
    let sandbox = manager.create(request(cx), &cx.sink).await?;
    same!(cx.sh(&sandbox, "cat README").await?, "v1");
    let info = sandbox.info().await?;
    same!(info.profile.map(|profile| profile.id).as_deref(), Some("profile.case"));
    same!(info.backend, Some(cx.backend.id()));
    same!(info.ttl, Some(Period::from_seconds(7200)));
    // Another process finds out the same.
    let again = cx.another_manager().await?.open(sandbox.id().as_str()).await?;
    same!(again.info().await?, sandbox.info().await?);
    Ok(())
}

async fn a_ttl_is_capped_and_counts_from_ready(cx: &Context) -> Check {
    let manager = manager(cx, "ttl: {default: 1h, max: 2h}\n").await?;
    let sandbox = manager.create(request(cx).ttl(Duration::from_secs(36_000)), &cx.sink).await?;
    let info = sandbox.info().await?;
    let (Some(ready), Some(expires)) = (info.ready_at, info.expires_at) else {
        return Err("it has no times".into());
    };
    // The time of the record and the guest's deadline are taken one after the other.
    let lives = expires.duration_since(ready).as_secs();
    holds!((7170..=7200).contains(&lives), "{lives} s are two hours");
    let error = error_of(sandbox.extend_ttl(Duration::from_secs(3600), &cx.sink).await)?;
    same!(error.kind(), ErrorKind::LimitExceeded);
    Ok(())
}

async fn acquiring_by_profile_twice_gives_the_same_sandbox(cx: &Context) -> Check {
    let manager = manager(cx, "ttl: {default: 1h}\n").await?;
    let first = manager.acquire("case", request(cx), &cx.sink).await?;
    let second = manager.acquire("case", request(cx), &cx.sink).await?;
    same!(first.id(), second.id());
    let longer = request(cx).ttl(Duration::from_secs(7200));
    let error = error_of(manager.acquire("case", longer, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::SpecMismatch);
    holds!(error.message().contains("lifetime.ttl_seconds"), "{error} names the field");
    Ok(())
}

async fn what_cannot_be_enforced_is_refused_before_anything_is_made(cx: &Context) -> Check {
    for (rest, says) in [
        ("isolation: {level: microvm}\n", "microvm"),
        ("resources: {disk_mb: 10}\n", "resources.disk_mb"),
        ("workspace: {mode: remote-canonical}\n", "remote-canonical"),
    ] {
        if says == "remote-canonical" && cx.has(Feature::RemoteWorkspace) {
            continue;
        }
        let manager = manager(cx, rest).await?;
        let error = error_of(manager.create(request(cx), &cx.sink).await)?;
        same!(error.kind(), ErrorKind::Unsupported);
        holds!(error.message().contains(says), "{error} names {says}");
        holds!(cx.backend.inventory().await?.is_empty(), "nothing was made");
    }
    let egress = Profile::from_yaml(
        &format!(
            "id: profile.case\nversion: \"1\"\nextension: {}\nnetwork: {{egress: [\"a:1\"]}}\n",
            cx.backend.id()
        ),
        "case.yaml",
    )?;
    same!(egress.network.default, NetworkDefault::Deny);
    let catalog = ProfileCatalog::none().with(egress);
    let manager = cx.manager_with_profiles(catalog, EnvSecrets).await?;
    let created = manager.create(request(cx), &cx.sink).await;
    if cx.has(Feature::NetworkDeny) {
        same!(cx.sh(&created?, "env | grep -c ^https_proxy=").await?, "1");
    } else {
        // Single hosts can be let through only where all others are kept out.
        let error = error_of(created)?;
        same!(error.kind(), ErrorKind::Unsupported);
        holds!(error.message().contains("network_deny"), "{error} names what is missing");
    }
    let elsewhere = cx.request().host("elsewhere");
    let error = error_of(cx.manager.create(elsewhere, &cx.sink).await)?;
    same!(error.kind(), ErrorKind::Unsupported);
    holds!(error.message().contains("elsewhere"), "{error} names the host");
    Ok(())
}

async fn an_unknown_profile_is_named(cx: &Context) -> Check {
    let manager = manager(cx, "").await?;
    let error = error_of(manager.create(CreateSandbox::profile("nope"), &cx.sink).await)?;
    same!(error.kind(), ErrorKind::NotFound);
    holds!(error.message().contains("nope"), "{error} names it");
    holds!(error.message().contains("profile.case"), "{error} names what there is");
    Ok(())
}
