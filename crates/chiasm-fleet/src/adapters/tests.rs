use std::fs;
use std::path::Path;

use super::*;

/// Writes an adapter's folder with a configuration and meaningless weights.
fn write(folder: &Path, rank: u64, weights: &[u8]) {
    fs::create_dir_all(folder).unwrap();
    let config = format!(
        r#"{{"r": {rank}, "lora_alpha": 16, "target_modules": ["q_proj"], "rank_pattern": {{"k": 2}}}}"#
    );
    fs::write(folder.join("adapter_config.json"), config).unwrap();
    fs::write(folder.join("adapter_model.safetensors"), weights).unwrap();
}

fn source(name: &str, path: &Path) -> AdapterSource {
    AdapterSource { name: name.to_owned(), path: path.display().to_string() }
}

fn inspect(source: &AdapterSource) -> Result<AdapterFiles, LoadError> {
    AdapterFiles::inspect(source, false, StampSource::Metadata)
}

#[test]
fn pipe_in_place_of_an_adapter_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("adapter_config.json");
    let status = std::process::Command::new("mkfifo").arg(pipe).status().unwrap();
    assert!(status.success());
    let refused = inspect(&source("x", dir.path())).unwrap_err().to_string();
    assert!(refused.contains("is not a regular file"), "{refused}");
}

#[test]
fn metadata_stamp_covers_name_folder_changes() {
    let dir = tempfile::tempdir().unwrap();
    let a = dir.path().join("a");
    let b = dir.path().join("b");
    write(&a, 8, b"one");
    write(&b, 8, b"one");
    let first = inspect(&source("x", &a)).unwrap();
    assert_eq!(first, inspect(&source("x", &a)).unwrap(), "the same again");
    assert_eq!(first.rank, Some(8));
    assert_ne!(first.stamp, inspect(&source("y", &a)).unwrap().stamp);
    assert_ne!(first.stamp, inspect(&source("x", &b)).unwrap().stamp);
    // A change that keeps size and modification time.
    let weights = a.join("adapter_model.safetensors");
    let modified = fs::metadata(&weights).unwrap().modified().unwrap();
    fs::write(&weights, b"two").unwrap();
    fs::File::options().write(true).open(&weights).unwrap().set_modified(modified).unwrap();
    assert_ne!(first.stamp, inspect(&source("x", &a)).unwrap().stamp);
}

#[test]
fn content_stamp_is_independent_of_folder() {
    let dir = tempfile::tempdir().unwrap();
    let a = dir.path().join("a");
    let b = dir.path().join("b");
    let stamp = |name: &str, path: &Path| {
        AdapterFiles::inspect(&source(name, path), false, StampSource::Content).unwrap().stamp
    };
    write(&a, 8, b"one");
    write(&b, 8, b"one");
    assert_eq!(stamp("x", &a), stamp("x", &b));
    assert_ne!(stamp("x", &a), stamp("y", &a));
    write(&b, 8, b"two");
    assert_ne!(stamp("x", &a), stamp("x", &b));
    // Another file.
    write(&b, 8, b"one");
    fs::write(b.join("new_embeddings.safetensors"), b"").unwrap();
    assert_ne!(stamp("x", &a), stamp("x", &b));
}

#[test]
fn invalid_adapter_is_refused_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |source: &AdapterSource| inspect(source).unwrap_err().to_string();
    assert!(refused(&source("x", &dir.path().join("none"))).contains("none"));
    assert!(refused(&source("x", dir.path())).contains("adapter_config.json is missing"));
    for config in ["", "{}", r#"{"r": -1}"#, &" ".repeat(2 << 20)] {
        fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        assert!(
            refused(&source("x", dir.path())).contains("adapter_config.json: "),
            "{}",
            config.len()
        );
    }
    assert!(matches!(inspect(&source("", dir.path())), Err(LoadError::Empty("lora_name"))));
    assert!(matches!(
        inspect(&AdapterSource { path: String::new(), ..source("x", dir.path()) }),
        Err(LoadError::Empty("lora_path"))
    ));
}

#[test]
fn folder_only_engines_see_gets_random_stamp() {
    let elsewhere = source("x", Path::new("/nowhere/adapter"));
    let inspect = || AdapterFiles::inspect(&elsewhere, true, StampSource::Metadata).unwrap();
    let files = inspect();
    assert_eq!((files.path.as_str(), files.rank), ("/nowhere/adapter", None));
    assert_ne!(files.stamp, inspect().stamp);
    let hub_id = AdapterSource { path: "owner/name".to_owned(), ..elsewhere };
    assert!(
        AdapterFiles::inspect(&hub_id, true, StampSource::Metadata).is_err(),
        "an engine would download it within a step"
    );
}

#[test]
fn ids_are_distinct_31_bit_numbers() {
    let with_stamp = |stamp| AdapterFiles { path: "/x".to_owned(), rank: None, stamp };
    assert_eq!(with_stamp([0; 8]).id().get(), 1);
    assert_eq!(with_stamp([255; 8]).id().get(), i32::MAX as u32);
    assert_eq!(found::next_id(with_stamp([255; 8]).id()).get(), 1);
    let adapters = Adapters::new(3);
    for name in ["a", "b", "c"] {
        adapters.serve(&source(name, Path::new("/x")), &with_stamp([255; 8])).unwrap();
    }
    let ids: Vec<u32> = adapters.all().iter().map(|adapter| adapter.id().get()).collect();
    assert_eq!(ids, [i32::MAX as u32, 1, 2]);
}

#[test]
fn limit_counts_adapter_until_it_is_unloaded() {
    let adapters = Adapters::new(1);
    let mut unused_adapters = adapters.take_unused().unwrap();
    let files = AdapterFiles { path: "/x".to_owned(), rank: None, stamp: [1; 8] };
    let serve = |name: &str| adapters.serve(&source(name, Path::new("/x")), &files);
    serve("a").unwrap();
    assert!(matches!(serve("a"), Err(LoadError::IsLoaded(_))));
    assert!(matches!(serve("b"), Err(LoadError::Full(1))));
    let in_flight = adapters.get("a").unwrap();
    drop(adapters.remove("a"));
    assert!(adapters.get("a").is_none());
    assert!(unused_adapters.try_recv().is_err(), "a request uses it");
    drop(in_flight);
    let unused = unused_adapters.try_recv().unwrap();
    assert!(unused.adapter.name.starts_with("a@"));
    assert!(matches!(serve("b"), Err(LoadError::Full(1))));
    drop(unused);
    serve("b").unwrap();
}
