//! A snapshot whose lineage has come near the engine's limit of layers is made into one layer.

use bollard::{
    models::ImageInspect,
    query_parameters::{
        CreateContainerOptionsBuilder, CreateImageOptionsBuilder, RemoveImageOptionsBuilder,
        TagImageOptionsBuilder,
    },
};
use futures::TryStreamExt;
use sandbox_core::Result;

use crate::{
    container::GUEST,
    error::asking,
    image::{self, KEPT, SNAPSHOT},
    instance::{self, Kind},
    shared::Shared,
    sweep,
};

const OPERATION: &str = "snapshot";

/// Makes an image of one layer of an image of many, under the same name. The old one stays, under
/// another name, for as long as something builds on it.
pub(crate) async fn if_deep(shared: &Shared, image: &str, found: &ImageInspect) -> Result<()> {
    let layers = found.root_fs.as_ref().and_then(|root| root.layers.as_ref()).map_or(0, Vec::len);
    if layers < shared.max_layers {
        return Ok(());
    }
    let docker = shared.docker(OPERATION).await?;
    let (repository, tag) = image.rsplit_once(':').unwrap_or((image, "latest"));
    let flat = format!("{tag}-flat");
    let container = format!("sandboxer-flatten-{tag}");
    image::remove(shared, &container).await;
    let body = bollard::models::ContainerCreateBody {
        image: Some(image.to_owned()),
        entrypoint: Some(vec![GUEST.to_owned()]),
        cmd: Some(Vec::new()),
        labels: Some(instance::labels(&shared.settings.scope, Kind::Helper)),
        ..Default::default()
    };
    let options = CreateContainerOptionsBuilder::default().name(&container).build();
    docker
        .create_container(Some(options), body)
        .await
        .map_err(asking(OPERATION, format!("make one layer of {image}")))?;
    let made = import(shared, &container, repository, &flat, found).await;
    image::remove(shared, &container).await;
    made?;
    let name = |tag: &str, from: String, to: &'static str| {
        let options = TagImageOptionsBuilder::default().repo(to).tag(tag).build();
        async move {
            docker
                .tag_image(&from, Some(options))
                .await
                .map_err(asking(OPERATION, format!("name the image {from}")))
        }
    };
    let deep = format!("{tag}-deep");
    name(&deep, image.to_owned(), KEPT).await?;
    name(tag, format!("{repository}:{flat}"), SNAPSHOT).await?;
    let options = RemoveImageOptionsBuilder::default().build();
    docker
        .remove_image(&format!("{repository}:{flat}"), Some(options), None)
        .await
        .map_err(asking(OPERATION, "take away a name that is not needed any more"))?;
    sweep::sweep(shared).await;
    Ok(())
}

/// What is in a container goes out of the engine and in again, piece by piece.
async fn import(
    shared: &Shared,
    container: &str,
    repository: &str,
    tag: &str,
    found: &ImageInspect,
) -> Result<()> {
    let docker = shared.docker(OPERATION).await?;
    let pieces = docker.export_container(container).map_err(std::io::Error::other);
    let options = CreateImageOptionsBuilder::default()
        .from_src("-")
        .repo(&format!("{repository}:{tag}"))
        .changes(changes(found))
        .build();
    // The stream borrows the client, the body must not: it is pumped.
    let (sender, receiver) = tokio::sync::mpsc::channel(8);
    let pump = async move {
        let mut pieces = Box::pin(pieces);
        loop {
            let next = pieces.try_next().await.transpose();
            let Some(next) = next else { return };
            if sender.send(next).await.is_err() {
                return;
            }
        }
    };
    let body = futures::stream::unfold(receiver, |mut receiver| async move {
        receiver.recv().await.map(|piece| (piece, receiver))
    });
    let imported = docker.create_image(Some(options), Some(bollard::body_try_stream(body)), None);
    let imported = imported.try_for_each(|_| std::future::ready(Ok(())));
    let ((), imported) = tokio::join!(pump, imported);
    imported.map_err(asking(OPERATION, "bring the one layer in"))
}

/// What an import would lose of an image's settings, as lines of a Dockerfile.
fn changes(found: &ImageInspect) -> Vec<String> {
    let mut lines = Vec::new();
    let Some(config) = &found.config else { return lines };
    for pair in config.env.iter().flatten() {
        if let Some((key, value)) = pair.split_once('=') {
            lines.push(format!("ENV {key}={}", quoted(value)));
        }
    }
    let mut labels: Vec<_> = config.labels.iter().flatten().collect();
    labels.sort();
    lines.extend(labels.iter().map(|(key, value)| format!("LABEL {key}={}", quoted(value))));
    lines
}

/// One word of a Dockerfile.
fn quoted(value: &str) -> String {
    let mut word = String::from('"');
    for c in value.chars() {
        if matches!(c, '"' | '\\' | '$') {
            word.push('\\');
        }
        word.push(c);
    }
    word + "\""
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_survive() {
        let config = bollard::models::ImageConfig {
            env: Some(vec!["PATH=/a:/b".into(), "ODD=a \"b\" $c".into()]),
            labels: Some([("sandboxer.kind".to_owned(), "snapshot".to_owned())].into()),
            ..Default::default()
        };
        let found = ImageInspect { config: Some(config), ..Default::default() };
        assert_eq!(
            changes(&found),
            [
                "ENV PATH=\"/a:/b\"",
                "ENV ODD=\"a \\\"b\\\" \\$c\"",
                "LABEL sandboxer.kind=\"snapshot\""
            ]
        );
    }
}
