use std::fs;
use std::path::Path;

use super::*;

/// An adapter's folder with a configuration and weights of no meaning.
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

fn look(source: &AdapterSource) -> Result<AdapterFiles, LoadError> {
    AdapterFiles::look(source, false, Stamps::Place)
}

#[test]
fn pipe_in_place_of_an_adapter_file_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let pipe = dir.path().join("adapter_config.json");
    let made = std::process::Command::new("mkfifo").arg(pipe).status().unwrap();
    assert!(made.success());
    let refused = look(&source("x", dir.path())).unwrap_err().to_string();
    assert!(refused.contains("is not a regular file"), "{refused}");
}

#[test]
fn an_adapter_is_its_name_its_place_and_its_content() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    write(&a, 8, b"one");
    write(&b, 8, b"one");
    let first = look(&source("x", &a)).unwrap();
    assert_eq!(first, look(&source("x", &a)).unwrap(), "the same again");
    assert_eq!(first.rank, Some(8));
    assert_ne!(first.stamp, look(&source("y", &a)).unwrap().stamp);
    assert_ne!(first.stamp, look(&source("x", &b)).unwrap().stamp);
    // The same size, and written with the time of before.
    let weights = a.join("adapter_model.safetensors");
    let modified = fs::metadata(&weights).unwrap().modified().unwrap();
    fs::write(&weights, b"two").unwrap();
    fs::File::options().write(true).open(&weights).unwrap().set_modified(modified).unwrap();
    assert_ne!(first.stamp, look(&source("x", &a)).unwrap().stamp);
}

#[test]
fn the_same_content_is_one_adapter_wherever_it_lies() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    let stamp = |name: &str, path: &Path| {
        AdapterFiles::look(&source(name, path), false, Stamps::Content).unwrap().stamp
    };
    write(&a, 8, b"one");
    write(&b, 8, b"one");
    assert_eq!(stamp("x", &a), stamp("x", &b));
    assert_ne!(stamp("x", &a), stamp("y", &a));
    write(&b, 8, b"two");
    assert_ne!(stamp("x", &a), stamp("x", &b));
    // A file more.
    write(&b, 8, b"one");
    fs::write(b.join("new_embeddings.safetensors"), b"").unwrap();
    assert_ne!(stamp("x", &a), stamp("x", &b));
}

#[test]
fn what_is_no_adapter_is_refused_with_its_path() {
    let dir = tempfile::tempdir().unwrap();
    let refused = |source: &AdapterSource| look(source).unwrap_err().to_string();
    assert!(refused(&source("x", &dir.path().join("none"))).contains("none"));
    assert!(refused(&source("x", dir.path())).contains("it has no adapter_config.json"));
    for config in ["", "{}", r#"{"r": -1}"#, &" ".repeat(2 << 20)] {
        fs::write(dir.path().join("adapter_config.json"), config).unwrap();
        assert!(
            refused(&source("x", dir.path())).contains("adapter_config.json: "),
            "{}",
            config.len()
        );
    }
    assert!(matches!(look(&source("", dir.path())), Err(LoadError::Empty("lora_name"))));
    assert!(matches!(
        look(&AdapterSource { path: String::new(), ..source("x", dir.path()) }),
        Err(LoadError::Empty("lora_path"))
    ));
}

#[test]
fn what_only_engines_see_is_taken_as_new() {
    let elsewhere = source("x", Path::new("/nowhere/adapter"));
    let one = AdapterFiles::look(&elsewhere, true, Stamps::Place).unwrap();
    assert_eq!((one.path.as_str(), one.rank), ("/nowhere/adapter", None));
    assert_ne!(one.stamp, AdapterFiles::look(&elsewhere, true, Stamps::Place).unwrap().stamp);
    let of_hub = AdapterSource { path: "owner/name".to_owned(), ..elsewhere };
    assert!(
        AdapterFiles::look(&of_hub, true, Stamps::Place).is_err(),
        "an engine would download it within a step"
    );
}

#[test]
fn ids_fit_31_bits_and_are_never_shared() {
    let with = |stamp| AdapterFiles { path: "/x".to_owned(), rank: None, stamp };
    assert_eq!(with([0; 8]).id().get(), 1);
    assert_eq!(with([255; 8]).id().get(), i32::MAX as u32);
    assert_eq!(found::following(with([255; 8]).id()).get(), 1);
    let adapters = Adapters::new(3);
    for name in ["a", "b", "c"] {
        adapters.serve(&source(name, Path::new("/x")), &with([255; 8])).unwrap();
    }
    let ids: Vec<u32> = adapters.all().iter().map(|adapter| adapter.id().get()).collect();
    assert_eq!(ids, [i32::MAX as u32, 1, 2]);
}

#[test]
fn a_place_is_free_when_engines_have_forgotten_its_adapter() {
    let adapters = Adapters::new(1);
    let mut leavings = adapters.leavings().unwrap();
    let files = AdapterFiles { path: "/x".to_owned(), rank: None, stamp: [1; 8] };
    let serve = |name: &str| adapters.serve(&source(name, Path::new("/x")), &files);
    serve("a").unwrap();
    assert!(matches!(serve("a"), Err(LoadError::IsLoaded(_))));
    assert!(matches!(serve("b"), Err(LoadError::Full(1))));
    let in_flight = adapters.get("a").unwrap();
    drop(adapters.remove("a"));
    assert!(adapters.get("a").is_none() && leavings.try_recv().is_err(), "a request has it");
    drop(in_flight);
    let leaving = leavings.try_recv().unwrap();
    assert!(leaving.adapter.name.starts_with("a@"));
    assert!(matches!(serve("b"), Err(LoadError::Full(1))));
    drop(leaving);
    serve("b").unwrap();
}
