use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::SystemTime;

use chiasm_backend::{KeyScheme, PlaceholderForm, VllmItems};
use chiasm_types::BlockSize;

use super::*;

fn class(block_size: u32) -> PlanClass {
    PlanClass {
        processor: Arc::from(&b"x"[..]),
        vllm_items: VllmItems::Any,
        placeholders: PlaceholderForm::Marker,
        keys: KeyScheme::Chiasm,
        block_size: BlockSize::new(block_size).unwrap(),
    }
}

fn stream(port: u16) -> KvEventStream {
    KvEventStream {
        endpoint: format!("tcp://127.0.0.1:{port}"),
        replay_endpoint: None,
        topic: String::new(),
    }
}

fn kept() -> KeptIndex {
    let position = StreamPosition { seq: 12, digest: [3; 32] };
    KeptIndex { position, history_known: true, snapshot: b"held blocks".to_vec() }
}

struct TestFolder {
    _folder: tempfile::TempDir,
    kept: KeptIndexes,
}

impl TestFolder {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kept = KeptIndexes::open(folder.path().join("kept")).unwrap();
        Self { _folder: folder, kept }
    }

    fn with_saved_index() -> Self {
        let test = Self::new();
        test.kept.save(&stream(1), &class(16), &kept()).unwrap();
        test
    }

    fn path(&self) -> PathBuf {
        self.kept.path(&stream(1))
    }

    fn take(&self) -> Option<KeptIndex> {
        self.kept.take(&stream(1), &class(16))
    }
}

#[test]
fn kept_index_is_taken_once() {
    let test = TestFolder::with_saved_index();
    assert_eq!(fs::metadata(test.path()).unwrap().mode() & 0o777, 0o600);
    assert_eq!(test.take(), Some(kept()));
    assert_eq!(test.take(), None);
    assert_eq!(fs::read_dir(&test.kept.folder).unwrap().count(), 0);
}

#[test]
fn each_engine_has_its_own_file() {
    let test = TestFolder::with_saved_index();
    assert_eq!(test.kept.take(&stream(2), &class(16)), None);
    assert_eq!(test.take(), Some(kept()));
}

#[test]
fn engine_with_other_blocks_gets_nothing() {
    let test = TestFolder::with_saved_index();
    assert_eq!(test.kept.take(&stream(1), &class(32)), None);
    assert!(!test.path().exists());
}

#[test]
fn changed_byte_is_detected() {
    let test = TestFolder::with_saved_index();
    let whole = fs::read(test.path()).unwrap();
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        let cut = &whole[..at];
        for bytes in [&changed[..], cut] {
            write(&test.path(), bytes).unwrap();
            assert_eq!(test.take(), None, "byte {at}");
            assert!(!test.path().exists());
        }
    }
}

#[test]
fn file_that_others_can_read_is_ignored() {
    let test = TestFolder::with_saved_index();
    fs::set_permissions(test.path(), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(test.take(), None);
}

#[test]
fn link_and_endless_file_are_ignored() {
    let test = TestFolder::new();
    std::os::unix::fs::symlink("/dev/zero", test.path()).unwrap();
    assert_eq!(test.take(), None);
    // A sparse file, which takes no space.
    write(&test.path(), b"").unwrap();
    File::options().write(true).open(test.path()).unwrap().set_len(MAX_FILE_BYTES + 1).unwrap();
    assert!(matches!(read(&test.path()), Err(KeptError::TooLarge(_))));
    assert_eq!(test.take(), None);
}

#[test]
fn old_files_are_removed_on_open() {
    let test = TestFolder::with_saved_index();
    KeptIndexes::open(&test.kept.folder).unwrap();
    assert!(test.path().exists());
    let file = File::options().write(true).open(test.path()).unwrap();
    file.set_modified(SystemTime::now() - 2 * MAX_AGE).unwrap();
    KeptIndexes::open(&test.kept.folder).unwrap();
    assert!(!test.path().exists());
}

#[test]
fn folder_that_others_can_enter_is_refused() {
    let test = TestFolder::new();
    fs::set_permissions(&test.kept.folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(KeptIndexes::open(&test.kept.folder).is_err());
}
