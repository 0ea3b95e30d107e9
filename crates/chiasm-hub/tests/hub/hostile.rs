//! Missing and private models, and invalid or hostile responses of the hub.

use std::fs;

use chiasm_hub::{HubError, Progress, RepoId, fetch};

use crate::test_hub::{Faults, TestHub, sha256};

/// Asserts that nothing was written outside the cache, and no byte of the weights into it.
fn assert_clean(hub: &TestHub) {
    assert_eq!(
        fs::read_dir(hub.home.path())
            .unwrap()
            .filter(|entry| entry.as_ref().unwrap().file_name() != "hub")
            .count(),
        0
    );
    let etag = sha256(&hub.file("model.safetensors"));
    let is_weights =
        |path: &&String| path.ends_with("safetensors") || path.contains(&format!("blobs/{etag}"));
    for path in hub.home_files().iter().filter(is_weights) {
        assert_eq!(fs::metadata(hub.home.path().join(path)).unwrap().len(), 0, "{path}");
    }
}

/// Fetches a model from a hub with `faults` and returns the text of the refusal.
async fn refusal(faults: Faults) -> String {
    let hub = TestHub::start().await;
    hub.set_faults(faults.clone());
    let error = hub.fetch("main", true).await.unwrap_err();
    assert!(matches!(error, HubError::Refused { .. }), "{faults:?}: {error}");
    assert_clean(&hub);
    error.to_string()
}

#[tokio::test]
async fn missing_model_or_revision_is_named() {
    let hub = TestHub::start().await;
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
    assert_eq!(hub.home_files(), [] as [&str; 0]);
}

#[tokio::test]
async fn gated_model_error_gives_advice_about_token() {
    for (status, code) in [(401, "GatedRepo"), (403, "GatedRepo"), (401, ""), (403, "")] {
        let hub = TestHub::start().await;
        hub.set_faults(Faults { status: Some((status, code)), ..Faults::default() });
        let mut request = hub.request("main", false);
        let without = fetch(&request, &Progress::default()).await.unwrap_err();
        assert!(matches!(without, HubError::Denied { .. }), "{without}");
        assert!(without.to_string().contains("set HF_TOKEN"), "{without}");
        let variable = |name: &str| match name {
            "HF_HOME" => Some(hub.home.path().into()),
            "HF_TOKEN" => Some("secret".into()),
            _ => None,
        };
        request.settings.token = chiasm_hub::HubSettings::from_variables(&variable).unwrap().token;
        let with = fetch(&request, &Progress::default()).await.unwrap_err().to_string();
        assert!(with.contains("has no access") && !with.contains("secret"), "{with}");
    }
}

#[tokio::test]
async fn token_is_only_sent_to_hub() {
    let hub = TestHub::start().await;
    let other = TestHub::start().await;
    let redirect =
        other.request("main", false).settings.endpoint.join("owner/tiny/resolve/x").unwrap();
    let variable = |name: &str| {
        (name == "HF_TOKEN").then(|| "secret".into()).or((name == "HF_HOME").then(|| "/h".into()))
    };
    let mut request = hub.request("main", true);
    request.settings.token = chiasm_hub::HubSettings::from_variables(&variable).unwrap().token;
    let elsewhere = format!(
        "{}/{}/config.json",
        redirect.as_str().trim_end_matches("/x"),
        crate::test_hub::COMMIT
    );
    hub.set_faults(Faults { redirect: Some(elsewhere), ..Faults::default() });
    let error = fetch(&request, &Progress::default()).await.unwrap_err();
    assert!(matches!(error, HubError::Refused { .. }), "{error}");
    let requests = hub.take_requests();
    assert!(requests.contains(&"GET model.safetensors with token".to_owned()), "{requests:?}");
    assert_eq!(other.take_requests(), ["GET config.json"]);
}

#[tokio::test]
async fn unsafe_paths_or_etags_are_refused() {
    for name in [
        "../../../../escaped.json",
        "/tmp/escaped.json",
        "a/../../escaped.json",
        "a\\..\\escaped.json",
    ] {
        let text = refusal(Faults { extra_name: Some(name.to_owned()), ..Faults::default() }).await;
        assert!(text.contains("escaped.json"), "{text}");
    }
    for etag in ["../../../escaped", "a/b", "..", ""] {
        let text = refusal(Faults { etag: Some(etag), ..Faults::default() }).await;
        assert!(text.contains("ETag"), "{text}");
    }
}

#[tokio::test]
async fn body_longer_than_announced_is_refused() {
    let text = refusal(Faults { endless: true, ..Faults::default() }).await;
    assert!(text.contains("more bytes"), "{text}");
    for size in [10, (3 << 20) + 1] {
        let text = refusal(Faults { announced_size: Some(size), ..Faults::default() }).await;
        assert!(text.contains(&size.to_string()), "{text}");
    }
}

#[tokio::test]
async fn bytes_with_wrong_hash_are_refused() {
    for names_only in [true, false] {
        let hub = TestHub::start().await;
        hub.set_faults(Faults { other_bytes: true, names_only, ..Faults::default() });
        let error = hub.fetch("main", true).await.unwrap_err();
        let expected = sha256(&hub.file("model.safetensors"));
        assert!(
            matches!(&error, HubError::Corrupt { property: "hash", .. })
                && error.to_string().contains(&expected),
            "{error}"
        );
        assert_clean(&hub);
    }
}

#[tokio::test]
async fn invalid_or_endless_redirects_are_refused() {
    for target in ["file:///etc/passwd", "ftp://127.0.0.1/x", "data:,x", "http:///"] {
        let text = refusal(Faults { redirect: Some(target.to_owned()), ..Faults::default() }).await;
        assert!(text.contains("redirect"), "{text}");
    }
    let circle = format!("/owner/tiny/resolve/{}/model.safetensors", crate::test_hub::COMMIT);
    let text = refusal(Faults { redirect: Some(circle), ..Faults::default() }).await;
    assert!(text.contains("more than 8 redirects"), "{text}");
}

#[tokio::test]
async fn too_large_model_is_refused_before_download() {
    let hub = TestHub::start().await;
    hub.set_faults(Faults { announced_size: Some(u64::MAX / 2), ..Faults::default() });
    let error = hub.fetch("main", true).await.unwrap_err();
    assert!(
        matches!(error, HubError::NoSpace { .. }) && error.to_string().contains("HF_HUB_CACHE"),
        "{error}"
    );
    assert!(!hub.take_requests().iter().any(|request| request.starts_with("linked")));
}
