//! Fetching models from a small hub on loopback, which misbehaves in some tests.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod hostile;
mod test_hub;

use std::fs;
use std::path::Path;

use chiasm_hub::{HubError, Progress, fetch};
use test_hub::{COMMIT, Faults, TestHub, git_sha1, sha256};

const SMALL: [&str; 3] = ["chat_templates/default.jinja", "config.json", "tokenizer.json"];

/// Asserts that a snapshot has exactly these files, with the hub's bytes.
fn assert_has(hub: &TestHub, dir: &Path, files: &[&str]) {
    let prefix = format!("hub/models--owner--tiny/snapshots/{COMMIT}/");
    let found = hub.home_files();
    let found: Vec<&str> = found.iter().filter_map(|path| path.strip_prefix(&prefix)).collect();
    assert_eq!(found, files);
    for file in files {
        assert!(fs::read(dir.join(file)).unwrap() == hub.file(file), "{file}");
    }
}

#[tokio::test]
async fn cache_layout_equals_pythons() {
    let hub = TestHub::start().await;
    let progress = Progress::default();
    let snapshot = fetch(&hub.request("main", false), &progress).await.unwrap();
    assert_has(&hub, &snapshot.dir, &SMALL);
    assert_eq!(snapshot.commit, COMMIT);
    assert!(snapshot.files.contains(&"model.safetensors".to_owned()), "listed, not downloaded");
    assert!(progress.total() > 0 && progress.done() == progress.total());

    let model = hub.cache().join("models--owner--tiny");
    assert_eq!(snapshot.dir, model.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(model.join("refs/main")).unwrap(), COMMIT);
    let config = git_sha1(&hub.file("config.json"));
    let link = fs::read_link(snapshot.dir.join("config.json")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(&config));
    let link = fs::read_link(snapshot.dir.join("chat_templates/default.jinja")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert!(hub.cache().join(format!(".locks/models--owner--tiny/{config}.lock")).is_file());

    hub.take_requests();
    let with_weights = hub.fetch("main", true).await.unwrap();
    assert_eq!(with_weights, snapshot);
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
    assert_eq!(
        hub.take_requests(),
        [
            "describe main",
            "HEAD model.safetensors",
            "GET model.safetensors",
            "linked model.safetensors from 0"
        ]
    );
    let weights = sha256(&hub.file("model.safetensors"));
    assert!(model.join("blobs").join(weights).is_file());
    assert!(
        !hub.home_files().iter().any(|path| path.contains("incomplete") || path.ends_with(".tmp"))
    );
}

#[tokio::test]
async fn code_is_downloaded_only_if_wanted() {
    let hub = TestHub::start().await;
    let mut request = hub.request("main", false);
    request.wanted.code = true;
    let snapshot = fetch(&request, &Progress::default()).await.unwrap();
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "modeling.py", "tokenizer.json"],
    );
}

#[tokio::test]
async fn complete_snapshot_is_not_downloaded_again() {
    let hub = TestHub::start().await;
    let first = hub.fetch(COMMIT, true).await.unwrap();
    hub.take_requests();
    assert_eq!(hub.fetch(COMMIT, true).await.unwrap(), first);
    assert_eq!(hub.fetch(COMMIT, false).await.unwrap(), first);
    assert_eq!(hub.take_requests(), [] as [&str; 0], "a commit does not change");
    assert_eq!(hub.fetch("main", true).await.unwrap(), first);
    assert_eq!(hub.take_requests(), ["describe main"], "a branch may change");
    assert_eq!(hub.fetch("refs/pr/1", true).await.unwrap(), first);
    assert_eq!(hub.fetch_offline("refs/pr/1", true).await.unwrap(), first);

    fs::remove_file(first.dir.join("config.json")).unwrap();
    hub.take_requests();
    assert_eq!(hub.fetch(COMMIT, true).await.unwrap(), first);
    assert_eq!(
        hub.take_requests(),
        [format!("describe {COMMIT}"), "HEAD config.json".to_owned()],
        "its blob was not deleted"
    );
}

#[tokio::test]
async fn offline_fetch_only_uses_cache() {
    let hub = TestHub::start().await;
    let error = hub.fetch_offline("main", false).await.unwrap_err();
    assert!(matches!(error, HubError::NotCached { .. }), "{error}");
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    let online = hub.fetch("main", false).await.unwrap();
    hub.take_requests();
    assert_eq!(hub.fetch_offline("main", false).await.unwrap(), online);
    assert_eq!(hub.fetch_offline(COMMIT, false).await.unwrap(), online);
    let error = hub.fetch_offline("main", true).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Incomplete { missing, .. } if missing == "model.safetensors"),
        "{error}"
    );
    assert!(matches!(hub.fetch_offline("v2", false).await, Err(HubError::NotCached { .. })));
    assert_eq!(hub.take_requests(), [] as [&str; 0]);
}

#[tokio::test]
async fn cache_without_listing_is_checked_by_its_files() {
    let hub = TestHub::start().await;
    let online = hub.fetch("main", true).await.unwrap();
    fs::remove_dir_all(hub.cache().join("models--owner--tiny/trees")).unwrap();
    assert_eq!(hub.fetch_offline("main", true).await.unwrap().dir, online.dir);
    fs::write(
        online.dir.join("model.safetensors.index.json"),
        r#"{"weight_map": {"a": "part-2.safetensors"}}"#,
    )
    .unwrap();
    let error = hub.fetch_offline("main", true).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Incomplete { missing, .. } if missing == "part-2.safetensors"),
        "{error}"
    );
    assert!(hub.fetch_offline("main", false).await.is_ok());
    fs::remove_file(online.dir.join("config.json")).unwrap();
    assert!(matches!(hub.fetch_offline("main", false).await, Err(HubError::Incomplete { .. })));
}

#[tokio::test]
async fn offline_fetch_ignores_missing_optional_files() {
    let hub = TestHub::start().await;
    hub.state.lock().unwrap().files.insert("results.json", b"{}".to_vec());
    let online = hub.fetch("main", true).await.unwrap();
    fs::remove_file(online.dir.join("results.json")).unwrap();
    assert_eq!(hub.fetch_offline("main", true).await.unwrap(), online);
    for needed in ["tokenizer.json", "chat_templates/default.jinja", "model.safetensors"] {
        let file = online.dir.join(needed);
        let away = hub.home.path().join("away");
        fs::rename(&file, &away).unwrap();
        let error = hub.fetch_offline("main", true).await.unwrap_err();
        assert!(
            matches!(&error, HubError::Incomplete { missing, .. } if missing == needed),
            "{error}"
        );
        fs::rename(&away, &file).unwrap();
    }
    // An online fetch downloads the file again, even for a commit.
    hub.fetch(COMMIT, true).await.unwrap();
    assert!(online.dir.join("results.json").is_file());
}

#[tokio::test]
async fn cached_snapshot_is_used_while_hub_fails() {
    let hub = TestHub::start().await;
    let first = hub.fetch("main", false).await.unwrap();
    for status in [(503, ""), (401, "")] {
        hub.set_faults(Faults { status: Some(status), ..Faults::default() });
        assert_eq!(hub.fetch("main", false).await.unwrap(), first, "{status:?}");
        assert!(hub.fetch("main", true).await.is_err(), "{status:?}");
    }
    let mut request = hub.request("main", true);
    request.settings.endpoint = "http://127.0.0.1:1".parse().unwrap();
    let error = fetch(&request, &Progress::default()).await.unwrap_err();
    assert!(
        matches!(error, HubError::Unreachable { .. }) && error.to_string().contains("127.0.0.1:1"),
        "{error}"
    );
    request.wanted.weights = None;
    assert_eq!(fetch(&request, &Progress::default()).await.unwrap(), first);
}

#[tokio::test]
async fn interrupted_download_is_resumed() {
    let hub = TestHub::start().await;
    hub.set_faults(Faults { cut: Some((1 << 20, 1)), ..Faults::default() });
    let progress = Progress::default();
    let snapshot = fetch(&hub.request("main", true), &progress).await.unwrap();
    let requests = hub.take_requests();
    assert!(
        requests.contains(&format!("linked model.safetensors from {}", 1 << 20)),
        "{requests:?}"
    );
    assert_eq!(progress.done(), progress.total());
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
}

#[tokio::test]
async fn later_fetch_resumes_failed_download() {
    let hub = TestHub::start().await;
    // Each attempt brings too few bytes to reset the count of attempts.
    hub.set_faults(Faults { cut: Some((1000, usize::MAX)), ..Faults::default() });
    let error = hub.fetch("main", true).await.unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    let mut files = hub.home_files().into_iter();
    let incomplete = files.find(|path| path.ends_with(".incomplete")).unwrap();
    let left = fs::metadata(hub.home.path().join(incomplete)).unwrap().len();
    assert_eq!(left, 4000, "four attempts");
    assert!(
        !hub.home_files().iter().any(|path| path.ends_with("model.safetensors")),
        "not in the snapshot"
    );

    hub.set_faults(Faults::default());
    hub.take_requests();
    let progress = Progress::default();
    let snapshot = fetch(&hub.request("main", true), &progress).await.unwrap();
    assert_eq!(hub.take_requests().last().unwrap(), "linked model.safetensors from 4000");
    assert_eq!(progress.done(), progress.total());
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
}

#[tokio::test]
async fn wrong_leftover_bytes_are_downloaded_again() {
    for no_ranges in [true, false] {
        let hub = TestHub::start().await;
        let weights = hub.file("model.safetensors");
        let blobs = hub.cache().join("models--owner--tiny/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", sha256(&weights))), [9; 5000]).unwrap();
        hub.set_faults(Faults { no_ranges, ..Faults::default() });
        let progress = Progress::default();
        let snapshot = fetch(&hub.request("main", true), &progress).await.unwrap();
        assert!(fs::read(snapshot.dir.join("model.safetensors")).unwrap() == weights);
        assert_eq!(progress.done(), progress.total());
        let requests = hub.take_requests();
        assert!(
            requests.contains(&"linked model.safetensors from 5000".to_owned()),
            "{requests:?}"
        );
        assert_eq!(
            requests.contains(&"linked model.safetensors from 0".to_owned()),
            !no_ranges,
            "{requests:?}"
        );
    }
}

#[tokio::test]
async fn concurrent_fetches_download_each_file_once() {
    let hub = TestHub::start().await;
    let (one, two) = tokio::join!(hub.fetch("main", true), hub.fetch("main", true));
    assert_eq!(one.unwrap(), two.unwrap());
    let requests = hub.take_requests();
    let downloads = requests.iter().filter(|request| request.starts_with("linked ")).count();
    assert_eq!(downloads, 1, "{requests:?}");
}

#[tokio::test]
async fn mirror_that_sends_only_names_works() {
    let hub = TestHub::start().await;
    hub.set_faults(Faults { names_only: true, ..Faults::default() });
    let snapshot = hub.fetch("main", true).await.unwrap();
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
    assert_eq!(hub.fetch_offline("main", true).await.unwrap().dir, snapshot.dir);
    assert!(
        !hub.cache().join("models--owner--tiny/trees").exists(),
        "Python's format needs sizes and hashes"
    );
}

#[tokio::test]
async fn equal_etags_of_mirror_do_not_mix_up_files() {
    let hub = TestHub::start().await;
    let same_length = br#"{"model_type": "yint"}"#.to_vec();
    hub.state.lock().unwrap().files.insert("generation_config.json", same_length);
    hub.set_faults(Faults { etag: Some("65f1a2b3-16"), ..Faults::default() });
    let snapshot = hub.fetch("main", false).await.unwrap();
    let files =
        ["chat_templates/default.jinja", "config.json", "generation_config.json", "tokenizer.json"];
    assert_has(&hub, &snapshot.dir, &files);

    let hub = TestHub::start().await;
    hub.set_faults(Faults { etag: Some("65f1a2b3-16"), names_only: true, ..Faults::default() });
    let error = hub.fetch("main", false).await.unwrap_err().to_string();
    assert!(error.contains("its ETag, 65f1a2b3-16, is that of another file"), "{error}");
}

#[tokio::test]
async fn partial_response_may_omit_total_size() {
    for (content_range, is_accepted) in
        [("bytes 5000-3145727/*", true), ("bytes 4999-3145727/3145728", false)]
    {
        let hub = TestHub::start().await;
        let weights = hub.file("model.safetensors");
        let blobs = hub.cache().join("models--owner--tiny/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", sha256(&weights))), &weights[..5000])
            .unwrap();
        hub.set_faults(Faults { content_range: Some(content_range), ..Faults::default() });
        let first = hub.fetch("main", true).await;
        assert_eq!(first.is_ok(), is_accepted, "{first:?}");
        let snapshot = hub.fetch("main", true).await.expect("a second start begins the file again");
        assert!(fs::read(snapshot.dir.join("model.safetensors")).unwrap() == weights);
    }
}
