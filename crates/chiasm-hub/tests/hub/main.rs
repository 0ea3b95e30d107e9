//! Models of a small hub on loopback: downloaded, found again, resumed; and a hub that misbehaves.
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    unreachable_pub,
    reason = "a test fails by panicking"
)]

mod hostile;
mod stand;

use std::fs;
use std::path::Path;

use chiasm_hub::{HubError, Progress, fetch};
use stand::{COMMIT, Hub, Manners, git_sha1, sha256};

const SMALL: [&str; 3] = ["chat_templates/default.jinja", "config.json", "tokenizer.json"];

/// Whether a snapshot has these files and no others, with the hub's bytes.
fn assert_has(hub: &Hub, dir: &Path, files: &[&str]) {
    let prefix = format!("hub/models--owner--tiny/snapshots/{COMMIT}/");
    let found = hub.found();
    let found: Vec<&str> = found.iter().filter_map(|path| path.strip_prefix(&prefix)).collect();
    assert_eq!(found, files);
    for file in files {
        assert!(
            fs::read(dir.join(file)).unwrap() == hub.world.lock().unwrap().files[file],
            "{file}"
        );
    }
}

#[tokio::test]
async fn small_files_and_then_weights_are_laid_out_as_python_does() {
    let hub = Hub::start().await;
    let progress = Progress::default();
    let snapshot = fetch(&hub.request("main", false), &progress).await.unwrap();
    assert_has(&hub, &snapshot.dir, &SMALL);
    assert_eq!(snapshot.commit, COMMIT);
    assert!(snapshot.files.contains(&"model.safetensors".to_owned()), "known, though not here");
    assert!(progress.total() > 0 && progress.done() == progress.total());

    let model = hub.cache().join("models--owner--tiny");
    assert_eq!(snapshot.dir, model.join("snapshots").join(COMMIT));
    assert_eq!(fs::read_to_string(model.join("refs/main")).unwrap(), COMMIT);
    let config = git_sha1(&hub.world.lock().unwrap().files["config.json"]);
    let link = fs::read_link(snapshot.dir.join("config.json")).unwrap();
    assert_eq!(link, Path::new("../../blobs").join(&config));
    let link = fs::read_link(snapshot.dir.join("chat_templates/default.jinja")).unwrap();
    assert!(link.starts_with("../../../blobs"), "{}", link.display());
    assert!(hub.cache().join(format!(".locks/models--owner--tiny/{config}.lock")).is_file());

    hub.asked();
    let with_weights = hub.fetch("main", true).await.unwrap();
    assert_eq!(with_weights, snapshot);
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
    assert_eq!(
        hub.asked(),
        [
            "describe main",
            "HEAD model.safetensors",
            "GET model.safetensors",
            "linked model.safetensors from 0"
        ]
    );
    let weights = sha256(&hub.world.lock().unwrap().files["model.safetensors"]);
    assert!(model.join("blobs").join(weights).is_file());
    assert!(!hub.found().iter().any(|path| path.contains("incomplete") || path.ends_with(".tmp")));
}

#[tokio::test]
async fn code_comes_only_where_it_is_trusted() {
    let hub = Hub::start().await;
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
async fn what_is_complete_is_asked_for_no_more() {
    let hub = Hub::start().await;
    let first = hub.fetch(COMMIT, true).await.unwrap();
    hub.asked();
    assert_eq!(hub.fetch(COMMIT, true).await.unwrap(), first);
    assert_eq!(hub.fetch(COMMIT, false).await.unwrap(), first);
    assert_eq!(hub.asked(), [] as [&str; 0], "a commit does not change");
    assert_eq!(hub.fetch("main", true).await.unwrap(), first);
    assert_eq!(hub.asked(), ["describe main"], "a branch may");
    assert_eq!(hub.fetch("refs/pr/1", true).await.unwrap(), first);
    assert_eq!(hub.offline("refs/pr/1", true).await.unwrap(), first);

    fs::remove_file(first.dir.join("config.json")).unwrap();
    hub.asked();
    assert_eq!(hub.fetch(COMMIT, true).await.unwrap(), first);
    assert_eq!(
        hub.asked(),
        [format!("describe {COMMIT}"), "HEAD config.json".to_owned()],
        "its blob is there"
    );
}

#[tokio::test]
async fn offline_takes_what_is_there_and_asks_nobody() {
    let hub = Hub::start().await;
    let error = hub.offline("main", false).await.unwrap_err();
    assert!(matches!(error, HubError::NotCached { .. }), "{error}");
    assert!(error.to_string().contains("HF_HUB_OFFLINE"), "{error}");
    let online = hub.fetch("main", false).await.unwrap();
    hub.asked();
    assert_eq!(hub.offline("main", false).await.unwrap(), online);
    assert_eq!(hub.offline(COMMIT, false).await.unwrap(), online);
    let error = hub.offline("main", true).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Incomplete { missing, .. } if missing == "model.safetensors"),
        "{error}"
    );
    assert!(matches!(hub.offline("v2", false).await, Err(HubError::NotCached { .. })));
    assert_eq!(hub.asked(), [] as [&str; 0]);
}

#[tokio::test]
async fn a_cache_without_a_listing_is_judged_by_its_files() {
    let hub = Hub::start().await;
    let online = hub.fetch("main", true).await.unwrap();
    fs::remove_dir_all(hub.cache().join("models--owner--tiny/trees")).unwrap();
    assert_eq!(hub.offline("main", true).await.unwrap().dir, online.dir);
    fs::write(
        online.dir.join("model.safetensors.index.json"),
        r#"{"weight_map": {"a": "part-2.safetensors"}}"#,
    )
    .unwrap();
    let error = hub.offline("main", true).await.unwrap_err();
    assert!(
        matches!(&error, HubError::Incomplete { missing, .. } if missing == "part-2.safetensors"),
        "{error}"
    );
    assert!(hub.offline("main", false).await.is_ok());
    fs::remove_file(online.dir.join("config.json")).unwrap();
    assert!(matches!(hub.offline("main", false).await, Err(HubError::Incomplete { .. })));
}

#[tokio::test]
async fn offline_does_without_files_that_change_nothing() {
    let hub = Hub::start().await;
    hub.world.lock().unwrap().files.insert("results.json", b"{}".to_vec());
    let online = hub.fetch("main", true).await.unwrap();
    fs::remove_file(online.dir.join("results.json")).unwrap();
    assert_eq!(hub.offline("main", true).await.unwrap(), online);
    for needed in ["tokenizer.json", "chat_templates/default.jinja", "model.safetensors"] {
        let (file, away) = (online.dir.join(needed), hub.home.path().join("away"));
        fs::rename(&file, &away).unwrap();
        let error = hub.offline("main", true).await.unwrap_err();
        assert!(
            matches!(&error, HubError::Incomplete { missing, .. } if missing == needed),
            "{error}"
        );
        fs::rename(&away, &file).unwrap();
    }
    // Online it comes again, also if the commit is named.
    hub.fetch(COMMIT, true).await.unwrap();
    assert!(online.dir.join("results.json").is_file());
}

#[tokio::test]
async fn a_hub_that_is_down_leaves_the_cache() {
    let hub = Hub::start().await;
    let first = hub.fetch("main", false).await.unwrap();
    for status in [(503, ""), (401, "")] {
        hub.misbehave(Manners { status: Some(status), ..Manners::default() });
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
async fn a_download_goes_on_where_it_was_cut() {
    let hub = Hub::start().await;
    hub.misbehave(Manners { cut: Some((1 << 20, 1)), ..Manners::default() });
    let progress = Progress::default();
    let snapshot = fetch(&hub.request("main", true), &progress).await.unwrap();
    let asked = hub.asked();
    assert!(asked.contains(&format!("linked model.safetensors from {}", 1 << 20)), "{asked:?}");
    assert_eq!(progress.done(), progress.total());
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
}

#[tokio::test]
async fn another_start_goes_on_where_one_has_ended() {
    let hub = Hub::start().await;
    // Each try brings some bytes, none of them enough to count.
    hub.misbehave(Manners { cut: Some((1000, usize::MAX)), ..Manners::default() });
    let error = hub.fetch("main", true).await.unwrap_err();
    assert!(matches!(error, HubError::Unreachable { .. }), "{error}");
    let incomplete = hub.found().into_iter().find(|path| path.ends_with(".incomplete")).unwrap();
    let left = fs::metadata(hub.home.path().join(incomplete)).unwrap().len();
    assert_eq!(left, 4000, "four tries");
    assert!(
        !hub.found().iter().any(|path| path.ends_with("model.safetensors")),
        "not in the snapshot"
    );

    hub.misbehave(Manners::default());
    hub.asked();
    let progress = Progress::default();
    let snapshot = fetch(&hub.request("main", true), &progress).await.unwrap();
    assert_eq!(hub.asked().last().unwrap(), "linked model.safetensors from 4000");
    assert_eq!(progress.done(), progress.total());
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
}

#[tokio::test]
async fn what_is_left_of_other_bytes_is_downloaded_anew() {
    for no_ranges in [true, false] {
        let hub = Hub::start().await;
        let weights = hub.world.lock().unwrap().files["model.safetensors"].clone();
        let blobs = hub.cache().join("models--owner--tiny/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", sha256(&weights))), [9; 5000]).unwrap();
        hub.misbehave(Manners { no_ranges, ..Manners::default() });
        let progress = Progress::default();
        let snapshot = fetch(&hub.request("main", true), &progress).await.unwrap();
        assert!(fs::read(snapshot.dir.join("model.safetensors")).unwrap() == weights);
        assert_eq!(progress.done(), progress.total());
        let asked = hub.asked();
        assert!(asked.contains(&"linked model.safetensors from 5000".to_owned()), "{asked:?}");
        assert_eq!(
            asked.contains(&"linked model.safetensors from 0".to_owned()),
            !no_ranges,
            "{asked:?}"
        );
    }
}

#[tokio::test]
async fn two_downloads_at_once_fetch_each_file_once() {
    let hub = Hub::start().await;
    let (one, two) = tokio::join!(hub.fetch("main", true), hub.fetch("main", true));
    assert_eq!(one.unwrap(), two.unwrap());
    let asked = hub.asked();
    assert_eq!(asked.iter().filter(|asked| asked.starts_with("linked ")).count(), 1, "{asked:?}");
}

#[tokio::test]
async fn a_mirror_that_tells_only_names_will_do() {
    let hub = Hub::start().await;
    hub.misbehave(Manners { names_only: true, ..Manners::default() });
    let snapshot = hub.fetch("main", true).await.unwrap();
    assert_has(
        &hub,
        &snapshot.dir,
        &["chat_templates/default.jinja", "config.json", "model.safetensors", "tokenizer.json"],
    );
    assert_eq!(hub.offline("main", true).await.unwrap().dir, snapshot.dir);
    assert!(
        !hub.cache().join("models--owner--tiny/trees").exists(),
        "Python needs more to read one"
    );
}

#[tokio::test]
async fn mirror_that_gives_all_files_the_same_etag_mixes_up_nothing() {
    let hub = Hub::start().await;
    let same_length = br#"{"model_type": "yint"}"#.to_vec();
    hub.world.lock().unwrap().files.insert("generation_config.json", same_length);
    hub.misbehave(Manners { etag: Some("65f1a2b3-16"), ..Manners::default() });
    let snapshot = hub.fetch("main", false).await.unwrap();
    let files =
        ["chat_templates/default.jinja", "config.json", "generation_config.json", "tokenizer.json"];
    assert_has(&hub, &snapshot.dir, &files);

    let hub = Hub::start().await;
    hub.misbehave(Manners { etag: Some("65f1a2b3-16"), names_only: true, ..Manners::default() });
    let error = hub.fetch("main", false).await.unwrap_err().to_string();
    assert!(error.contains("its ETag, 65f1a2b3-16, is that of another file"), "{error}");
}

#[tokio::test]
async fn part_of_a_file_may_come_without_the_files_size() {
    for (content_range, is_taken) in
        [("bytes 5000-3145727/*", true), ("bytes 4999-3145727/3145728", false)]
    {
        let hub = Hub::start().await;
        let weights = hub.world.lock().unwrap().files["model.safetensors"].clone();
        let blobs = hub.cache().join("models--owner--tiny/blobs");
        fs::create_dir_all(&blobs).unwrap();
        fs::write(blobs.join(format!("{}.incomplete", sha256(&weights))), &weights[..5000])
            .unwrap();
        hub.misbehave(Manners { content_range: Some(content_range), ..Manners::default() });
        let first = hub.fetch("main", true).await;
        assert_eq!(first.is_ok(), is_taken, "{first:?}");
        let snapshot = hub.fetch("main", true).await.expect("a second start begins the file again");
        assert!(fs::read(snapshot.dir.join("model.safetensors")).unwrap() == weights);
    }
}
