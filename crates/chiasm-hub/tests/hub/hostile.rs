//! Models that are not there or not for everybody, and answers that no hub should give.

use std::fs;

use chiasm_hub::{HubError, Progress, RepoId, fetch};

use crate::stand::{Hub, Manners, sha256};

/// Whether nothing is outside the cache, and nothing of the weights in it.
fn assert_clean(hub: &Hub) {
    assert_eq!(
        fs::read_dir(hub.home.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name() != "hub")
            .count(),
        0
    );
    let etag = sha256(&hub.world.lock().unwrap().files["model.safetensors"]);
    let of_weights =
        |path: &&String| path.ends_with("safetensors") || path.contains(&format!("blobs/{etag}"));
    for path in hub.found().iter().filter(of_weights) {
        assert_eq!(fs::metadata(hub.home.path().join(path)).unwrap().len(), 0, "{path}");
    }
}

async fn refused(manners: Manners) -> String {
    let hub = Hub::start().await;
    hub.misbehave(manners.clone());
    let error = hub.fetch("main", true).await.unwrap_err();
    assert!(matches!(error, HubError::Refused { .. }), "{manners:?}: {error}");
    assert_clean(&hub);
    error.to_string()
}

#[tokio::test]
async fn a_missing_model_or_revision_is_named() {
    let hub = Hub::start().await;
    let mut request = hub.request("main", false);
    request.repo = "owner/typo".parse::<RepoId>().unwrap();
    let error = fetch(&request, &Progress::default()).await.unwrap_err();
    assert!(
        matches!(error, HubError::NoSuchModel { .. }) && error.to_string().contains("owner/typo"),
        "{error}"
    );
    assert!(error.to_string().contains("set HF_TOKEN"), "{error}");
    let error = hub.fetch("v9", false).await.unwrap_err();
    assert!(
        matches!(error, HubError::NoSuchRevision { .. }) && error.to_string().contains("'v9'"),
        "{error}"
    );
    assert_eq!(hub.found(), [] as [&str; 0]);
}

#[tokio::test]
async fn a_gated_model_asks_for_a_token_or_says_that_it_has_no_access() {
    for (status, code) in [(401, "GatedRepo"), (403, "GatedRepo"), (401, ""), (403, "")] {
        let hub = Hub::start().await;
        hub.misbehave(Manners { status: Some((status, code)), ..Manners::default() });
        let mut request = hub.request("main", false);
        let without = fetch(&request, &Progress::default()).await.unwrap_err();
        assert!(matches!(without, HubError::Denied { .. }), "{without}");
        assert!(without.to_string().contains("set HF_TOKEN"), "{without}");
        let of = |name: &str| match name {
            "HF_HOME" => Some(hub.home.path().into()),
            "HF_TOKEN" => Some("secret".into()),
            _ => None,
        };
        request.settings.token = chiasm_hub::HubSettings::from_variables(&of).unwrap().token;
        let with = fetch(&request, &Progress::default()).await.unwrap_err().to_string();
        assert!(with.contains("has no access") && !with.contains("secret"), "{with}");
    }
}

#[tokio::test]
async fn the_token_is_for_the_hub_alone() {
    let (hub, other) = (Hub::start().await, Hub::start().await);
    let redirect =
        other.request("main", false).settings.endpoint.join("owner/tiny/resolve/x").unwrap();
    let of = |name: &str| {
        (name == "HF_TOKEN").then(|| "secret".into()).or((name == "HF_HOME").then(|| "/h".into()))
    };
    let mut request = hub.request("main", true);
    request.settings.token = chiasm_hub::HubSettings::from_variables(&of).unwrap().token;
    let elsewhere = format!(
        "{}/{}/config.json",
        redirect.as_str().trim_end_matches("/x"),
        crate::stand::COMMIT
    );
    hub.misbehave(Manners { redirect: Some(elsewhere), ..Manners::default() });
    let error = fetch(&request, &Progress::default()).await.unwrap_err();
    assert!(matches!(error, HubError::Refused { .. }), "{error}");
    let asked = hub.asked();
    assert!(asked.contains(&"GET model.safetensors with token".to_owned()), "{asked:?}");
    assert_eq!(other.asked(), ["GET config.json"]);
}

#[tokio::test]
async fn names_that_lead_out_of_the_cache_are_refused() {
    for name in [
        "../../../../escaped.json",
        "/tmp/escaped.json",
        "a/../../escaped.json",
        "a\\..\\escaped.json",
    ] {
        let text =
            refused(Manners { extra_name: Some(name.to_owned()), ..Manners::default() }).await;
        assert!(text.contains("escaped.json"), "{text}");
    }
    for etag in ["../../../escaped", "a/b", "..", ""] {
        let text = refused(Manners { etag: Some(etag), ..Manners::default() }).await;
        assert!(text.contains("ETag"), "{text}");
    }
}

#[tokio::test]
async fn bodies_are_no_longer_than_announced() {
    let text = refused(Manners { endless: true, ..Manners::default() }).await;
    assert!(text.contains("more bytes"), "{text}");
    for said in [10, (3 << 20) + 1] {
        let text = refused(Manners { said_size: Some(said), ..Manners::default() }).await;
        assert!(text.contains(&said.to_string()), "{text}");
    }
}

#[tokio::test]
async fn bytes_with_another_hash_are_refused() {
    for names_only in [true, false] {
        let hub = Hub::start().await;
        hub.misbehave(Manners { other_bytes: true, names_only, ..Manners::default() });
        let error = hub.fetch("main", true).await.unwrap_err();
        let expected = sha256(&hub.world.lock().unwrap().files["model.safetensors"]);
        assert!(
            matches!(&error, HubError::Corrupt { what: "hash", .. })
                && error.to_string().contains(&expected),
            "{error}"
        );
        assert_clean(&hub);
    }
}

#[tokio::test]
async fn redirects_lead_to_http_alone_and_somewhere() {
    for target in ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "http:///"] {
        let text =
            refused(Manners { redirect: Some(target.to_owned()), ..Manners::default() }).await;
        assert!(text.contains("redirect"), "{text}");
    }
    let circle = format!("/owner/tiny/resolve/{}/model.safetensors", crate::stand::COMMIT);
    let text = refused(Manners { redirect: Some(circle), ..Manners::default() }).await;
    assert!(text.contains("more than 8 redirects"), "{text}");
}

#[tokio::test]
async fn a_size_beyond_the_disk_is_told_before_anything_comes() {
    let hub = Hub::start().await;
    hub.misbehave(Manners { said_size: Some(u64::MAX / 2), ..Manners::default() });
    let error = hub.fetch("main", true).await.unwrap_err();
    assert!(
        matches!(error, HubError::NoSpace { .. }) && error.to_string().contains("HF_HUB_CACHE"),
        "{error}"
    );
    assert!(!hub.asked().iter().any(|asked| asked.starts_with("linked")));
}
