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
    KeptIndex { position, history_known: true, snapshot: b"what it held".to_vec() }
}

struct Stand {
    _folder: tempfile::TempDir,
    kept: KeptIndexes,
}

impl Stand {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kept = KeptIndexes::open(folder.path().join("kept")).unwrap();
        Self { _folder: folder, kept }
    }

    fn left() -> Self {
        let stand = Self::new();
        stand.kept.leave(&stream(1), &class(16), &kept()).unwrap();
        stand
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
    let stand = Stand::left();
    assert_eq!(fs::metadata(stand.path()).unwrap().mode() & 0o777, 0o600);
    assert_eq!(stand.take(), Some(kept()));
    assert_eq!(stand.take(), None);
    assert_eq!(fs::read_dir(&stand.kept.folder).unwrap().count(), 0);
}

#[test]
fn other_engine_has_a_file_of_its_own() {
    let stand = Stand::left();
    assert_eq!(stand.kept.take(&stream(2), &class(16)), None);
    assert_eq!(stand.take(), Some(kept()));
}

#[test]
fn engine_with_other_blocks_gets_nothing() {
    let stand = Stand::left();
    assert_eq!(stand.kept.take(&stream(1), &class(32)), None);
    assert!(!stand.path().exists());
}

#[test]
fn any_changed_byte_is_noticed() {
    let stand = Stand::left();
    let whole = fs::read(stand.path()).unwrap();
    for at in 0..whole.len() {
        let mut changed = whole.clone();
        changed[at] ^= 1;
        let cut = &whole[..at];
        for bytes in [&changed[..], cut] {
            write(&stand.path(), bytes).unwrap();
            assert_eq!(stand.take(), None, "byte {at}");
            assert!(!stand.path().exists());
        }
    }
}

#[test]
fn file_that_others_can_read_is_ignored() {
    let stand = Stand::left();
    fs::set_permissions(stand.path(), fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(stand.take(), None);
}

#[test]
fn link_and_endless_file_are_ignored() {
    let stand = Stand::new();
    std::os::unix::fs::symlink("/dev/zero", stand.path()).unwrap();
    assert_eq!(stand.take(), None);
    // Sparse: it takes no room.
    write(&stand.path(), b"").unwrap();
    File::options().write(true).open(stand.path()).unwrap().set_len(MAX_BYTES + 1).unwrap();
    assert!(matches!(read(&stand.path()), Err(KeptError::TooLarge(_))));
    assert_eq!(stand.take(), None);
}

#[test]
fn old_files_are_removed_at_the_start() {
    let stand = Stand::left();
    KeptIndexes::open(&stand.kept.folder).unwrap();
    assert!(stand.path().exists());
    let file = File::options().write(true).open(stand.path()).unwrap();
    file.set_modified(SystemTime::now() - 2 * MAX_AGE).unwrap();
    KeptIndexes::open(&stand.kept.folder).unwrap();
    assert!(!stand.path().exists());
}

#[test]
fn folder_that_others_can_enter_is_refused() {
    let stand = Stand::new();
    fs::set_permissions(&stand.kept.folder, fs::Permissions::from_mode(0o755)).unwrap();
    assert!(KeptIndexes::open(&stand.kept.folder).is_err());
}
