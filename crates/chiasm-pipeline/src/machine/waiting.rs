//! Media items that jobs wait for: files, or the tensors that a frontend makes of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use chiasm_media::{ContentHash, EncodedMedia};
use chiasm_types::MmHash;
use chiasm_vision::ImagePlan;
use tokio::sync::oneshot;

use super::super::processed::TensorKey;

/// A requested item that was received.
#[derive(Clone)]
pub(super) enum ReceivedItem {
    /// The item's file.
    File(EncodedMedia),
    /// The pixels that a frontend has made of the item, in the expected format.
    Pixels(Bytes),
}

/// The tensors that are accepted instead of an image's file.
#[derive(Clone)]
pub(super) struct ExpectedTensors {
    pub(super) key: TensorKey,
    /// The plan of the image, if it has the size that the frontend reports.
    pub(super) plan: Arc<ImagePlan>,
}

/// The items that jobs wait for.
#[derive(Default)]
pub(super) struct PendingItems {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// The waiters, by the content of their files.
    waiters: HashMap<ContentHash, Vec<Waiter>>,
    /// The file of each item with expected tensors.
    files: HashMap<MmHash, ContentHash>,
}

struct Waiter {
    sender: oneshot::Sender<ReceivedItem>,
    expected: Option<ExpectedTensors>,
}

impl Waiter {
    fn expects(&self, hash: &MmHash) -> bool {
        self.expected.as_ref().is_some_and(|expected| expected.key.hash == *hash)
    }
}

impl Inner {
    /// Removes and returns the waiters of a file that match a predicate.
    fn take(&mut self, content: &ContentHash, predicate: impl Fn(&Waiter) -> bool) -> Vec<Waiter> {
        let Some(waiters) = self.waiters.get_mut(content) else { return Vec::new() };
        let taken: Vec<_> = waiters.extract_if(.., |waiter| predicate(waiter)).collect();
        for expected in taken.iter().filter_map(|waiter| waiter.expected.as_ref()) {
            let hash = &expected.key.hash;
            if !waiters.iter().any(|waiter| waiter.expects(hash)) {
                self.files.remove(hash);
            }
        }
        if waiters.is_empty() {
            self.waiters.remove(content);
        }
        taken
    }
}

impl PendingItems {
    /// Registers a waiter for a file or the expected tensors. Also returns `true` if another waiter
    /// has requested data that completes this one, too.
    pub(super) fn wait<'a>(
        &'a self,
        content: &'a ContentHash,
        expected: Option<ExpectedTensors>,
    ) -> (PendingItem<'a>, bool) {
        let (sender, receiver) = oneshot::channel();
        let mut inner = self.inner();
        if let Some(expected) = &expected {
            inner.files.insert(expected.key.hash, *content);
        }
        let waiters = inner.waiters.entry(*content).or_default();
        let key = expected.as_ref().map(|expected| expected.key);
        // A frontend that may send tensors sends them instead of the file, in the requested format.
        let completes_this = |other: &Waiter| match &other.expected {
            None => true,
            Some(other) => key == Some(other.key),
        };
        let is_requested = waiters.iter().any(completes_this);
        waiters.push(Waiter { sender, expected });
        (PendingItem { pending: self, content, receiver }, is_requested)
    }

    /// Sends a received file to all its waiters.
    pub(super) fn complete_with_file(&self, file: &EncodedMedia) {
        for Waiter { sender, .. } in self.inner().take(&file.content, |_| true) {
            let _ = sender.send(ReceivedItem::File(file.clone()));
        }
    }

    /// Returns the tensors of this item that waiters expect.
    pub(super) fn expected(&self, hash: &MmHash) -> Vec<ExpectedTensors> {
        let inner = self.inner();
        let waiters = inner.files.get(hash).and_then(|content| inner.waiters.get(content));
        let expected = waiters.into_iter().flatten().filter(|waiter| waiter.expects(hash));
        expected.filter_map(|waiter| waiter.expected.clone()).collect()
    }

    /// Sends received pixels to all waiters that expect tensors like `received`.
    pub(super) fn complete_with_pixels(&self, received: &ExpectedTensors, pixels: &Bytes) {
        let mut inner = self.inner();
        let Some(content) = inner.files.get(&received.key.hash).copied() else { return };
        let expects_these = |waiter: &Waiter| {
            waiter.expected.as_ref().is_some_and(|expected| {
                expected.key == received.key && expected.plan.original == received.plan.original
            })
        };
        for Waiter { sender, .. } in inner.take(&content, expects_these) {
            let _ = sender.send(ReceivedItem::Pixels(pixels.clone()));
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An item that a job waits for. Dropping this removes the waiter.
pub(super) struct PendingItem<'a> {
    pending: &'a PendingItems,
    content: &'a ContentHash,
    pub(super) receiver: oneshot::Receiver<ReceivedItem>,
}

impl Drop for PendingItem<'_> {
    fn drop(&mut self) {
        self.receiver.close();
        self.pending.inner().take(self.content, |waiter| waiter.sender.is_closed());
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use chiasm_backend::TensorFormat;
    use chiasm_media::MediaLimits;
    use chiasm_types::Dtype;
    use chiasm_vision::{ImageKwargs, ImageSize, NoVocabulary, VisionModel};

    use super::*;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/model");
    const PICTURE: &[u8] =
        include_bytes!(concat!(env!("CARGO_MANIFEST_DIR"), "/../chiasm/assets/images/dawn.jpg"));

    /// Returns the expected tensors of an image of this width.
    fn expected(hash: u8, format: TensorFormat, width: u32) -> ExpectedTensors {
        let model = VisionModel::from_model_dir(Path::new(MODEL), &NoVocabulary).unwrap().unwrap();
        let plan = model.plan(ImageSize { width, height: 224 }, &ImageKwargs::default()).unwrap();
        let key = TensorKey { hash: MmHash::new([hash; 32]), format };
        ExpectedTensors { key, plan: Arc::new(plan) }
    }

    /// Returns the kind of the received item, if there is one.
    fn received(pending: &mut PendingItem<'_>) -> Option<&'static str> {
        pending.receiver.try_recv().ok().map(|item| match item {
            ReceivedItem::File(_) => "file",
            ReceivedItem::Pixels(_) => "pixels",
        })
    }

    fn is_empty(pending: &PendingItems) -> bool {
        let inner = pending.inner();
        inner.waiters.is_empty() && inner.files.is_empty()
    }

    #[test]
    fn waiter_gets_file_or_expected_tensors() {
        let file =
            EncodedMedia::from_bytes(Bytes::from_static(PICTURE), &MediaLimits::default()).unwrap();
        let raw = TensorFormat::Raw;
        let float = TensorFormat::Normalized(Dtype::BF16);
        let pending = PendingItems::default();
        let wait = |expected| pending.wait(&file.content, expected);
        let (mut first, is_requested) = wait(Some(expected(1, raw, 280)));
        assert!(!is_requested);
        // The first waiter's tensors do not complete any of these.
        let mut others =
            [None, Some(expected(1, float, 280)), Some(expected(2, raw, 280))].map(|other| {
                let pending = PendingItems::default();
                let _first = pending.wait(&file.content, Some(expected(1, raw, 280)));
                assert!(!pending.wait(&file.content, other.clone()).1);
                wait(other).0
            });
        let (mut same, is_requested) = wait(Some(expected(1, raw, 280)));
        assert!(is_requested);
        // A requested file would complete this one, too: the size of the file is not known yet.
        let (mut wrong_size, is_requested) = wait(Some(expected(1, raw, 560)));
        assert!(is_requested);
        assert_eq!(pending.expected(&MmHash::new([1; 32])).len(), 4);
        assert_eq!(pending.expected(&MmHash::new([3; 32])).len(), 0);
        pending.complete_with_pixels(&expected(1, raw, 280), &Bytes::new());
        assert_eq!([&mut first, &mut same].map(received), [Some("pixels"); 2]);
        assert_eq!(received(&mut wrong_size), None);
        assert_eq!(others.each_mut().map(received), [None; 3]);
        pending.complete_with_file(&file);
        assert_eq!(received(&mut wrong_size), Some("file"));
        assert_eq!(others.each_mut().map(received), [Some("file"); 3]);
        assert!(is_empty(&pending));
    }

    #[test]
    fn dropped_waiter_is_removed() {
        let content = ContentHash::new([7; 32]);
        let pending = PendingItems::default();
        let wait = |hash| pending.wait(&content, Some(expected(hash, TensorFormat::Raw, 280))).0;
        let first = wait(1);
        let same = wait(1);
        let other = wait(2);
        drop(first);
        assert_eq!(pending.expected(&MmHash::new([1; 32])).len(), 1);
        drop(same);
        assert!(pending.expected(&MmHash::new([1; 32])).is_empty());
        assert_eq!(pending.expected(&MmHash::new([2; 32])).len(), 1);
        drop(other);
        assert!(is_empty(&pending));
        // Pixels without a waiter are ignored.
        pending.complete_with_pixels(&expected(1, TensorFormat::Raw, 280), &Bytes::new());
    }
}
