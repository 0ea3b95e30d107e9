//! Who waits for files of media items, or for the tensors that a frontend makes of them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use chiasm_media::{ContentHash, EncodedMedia};
use chiasm_types::MmHash;
use chiasm_vision::ImagePlan;
use tokio::sync::oneshot;

use super::super::processed::Form;

/// What has come of an item that was asked for.
#[derive(Clone)]
pub(super) enum Came {
    /// Its file.
    File(EncodedMedia),
    /// The pixels that a frontend has made of it, as they were expected.
    Pixels(Bytes),
}

/// Tensors that are taken in place of an image's file.
#[derive(Clone)]
pub(super) struct Expected {
    pub(super) form: Form,
    /// What the image becomes if it has the size that its frontend says.
    pub(super) plan: Arc<ImagePlan>,
}

/// All who wait.
#[derive(Default)]
pub(super) struct Waiting {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    /// By what the files are.
    waiters: HashMap<ContentHash, Vec<Waiter>>,
    /// The file of each item of which tensors are expected.
    files: HashMap<MmHash, ContentHash>,
}

struct Waiter {
    here: oneshot::Sender<Came>,
    expected: Option<Expected>,
}

impl Waiter {
    fn expects(&self, hash: &MmHash) -> bool {
        self.expected.as_ref().is_some_and(|expected| expected.form.hash == *hash)
    }
}

impl Inner {
    /// Takes out the waiters of a file that are meant.
    fn take(&mut self, content: &ContentHash, is_meant: impl Fn(&Waiter) -> bool) -> Vec<Waiter> {
        let Some(waiters) = self.waiters.get_mut(content) else { return Vec::new() };
        let taken: Vec<_> = waiters.extract_if(.., |waiter| is_meant(waiter)).collect();
        for Expected { form, .. } in taken.iter().filter_map(|waiter| waiter.expected.as_ref()) {
            if !waiters.iter().any(|waiter| waiter.expects(&form.hash)) {
                self.files.remove(&form.hash);
            }
        }
        if waiters.is_empty() {
            self.waiters.remove(content);
        }
        taken
    }
}

impl Waiting {
    /// Waits for a file, or for what is expected in its place, until what is returned is dropped;
    /// and whether something that ends the wait has been asked for by another one.
    pub(super) fn wait<'a>(
        &'a self,
        content: &'a ContentHash,
        expected: Option<Expected>,
    ) -> (Wait<'a>, bool) {
        let (here, came) = oneshot::channel();
        let mut inner = self.inner();
        if let Some(Expected { form, .. }) = &expected {
            inner.files.insert(form.hash, *content);
        }
        let waiters = inner.waiters.entry(*content).or_default();
        let mine = expected.as_ref().map(|expected| expected.form);
        // A frontend that may send tensors sends them in place of the file, and in the form that it
        // was asked for.
        let ends_this = |other: &Waiter| match &other.expected {
            None => true,
            Some(others) => mine == Some(others.form),
        };
        let is_asked_for = waiters.iter().any(ends_this);
        waiters.push(Waiter { here, expected });
        (Wait { waiting: self, content, came }, is_asked_for)
    }

    /// A file has come.
    pub(super) fn file_came(&self, file: &EncodedMedia) {
        for Waiter { here, .. } in self.inner().take(&file.content, |_| true) {
            let _ = here.send(Came::File(file.clone()));
        }
    }

    /// What is expected of the tensors of this item; nothing if nobody waits for them.
    pub(super) fn expected(&self, hash: &MmHash) -> Vec<Expected> {
        let inner = self.inner();
        let waiters = inner.files.get(hash).and_then(|content| inner.waiters.get(content));
        let expected = waiters.into_iter().flatten().filter(|waiter| waiter.expects(hash));
        expected.filter_map(|waiter| waiter.expected.clone()).collect()
    }

    /// Tensors have come that are as these are expected to be.
    pub(super) fn pixels_came(&self, came: &Expected, pixels: &Bytes) {
        let mut inner = self.inner();
        let Some(content) = inner.files.get(&came.form.hash).copied() else { return };
        let expects_them = |waiter: &Waiter| {
            waiter
                .expected
                .as_ref()
                .is_some_and(|it| it.form == came.form && it.plan.original == came.plan.original)
        };
        for Waiter { here, .. } in inner.take(&content, expects_them) {
            let _ = here.send(Came::Pixels(pixels.clone()));
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A wait. Nobody waits any more when it is dropped.
pub(super) struct Wait<'a> {
    waiting: &'a Waiting,
    content: &'a ContentHash,
    pub(super) came: oneshot::Receiver<Came>,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.came.close();
        self.waiting.inner().take(self.content, |waiter| waiter.here.is_closed());
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

    /// What is expected of an image of this width.
    fn expected(hash: u8, format: TensorFormat, width: u32) -> Expected {
        let model = VisionModel::from_model_dir(Path::new(MODEL), &NoVocabulary).unwrap().unwrap();
        let plan = model.plan(ImageSize { width, height: 224 }, &ImageKwargs::default()).unwrap();
        Expected { form: Form { hash: MmHash::new([hash; 32]), format }, plan: Arc::new(plan) }
    }

    /// What has come so far.
    fn came(wait: &mut Wait<'_>) -> Option<&'static str> {
        wait.came.try_recv().ok().map(|came| match came {
            Came::File(_) => "file",
            Came::Pixels(_) => "pixels",
        })
    }

    fn is_empty(waiting: &Waiting) -> bool {
        let inner = waiting.inner();
        inner.waiters.is_empty() && inner.files.is_empty()
    }

    #[test]
    fn who_waits_gets_the_file_or_the_tensors_that_are_expected() {
        let file =
            EncodedMedia::from_bytes(Bytes::from_static(PICTURE), &MediaLimits::default()).unwrap();
        let (raw, float) = (TensorFormat::Raw, TensorFormat::Normalized(Dtype::BF16));
        let waiting = Waiting::default();
        let wait = |expected| waiting.wait(&file.content, expected);
        let (mut first, is_asked_for) = wait(Some(expected(1, raw, 280)));
        assert!(!is_asked_for);
        // Tensors of the first are none of these.
        let mut others =
            [None, Some(expected(1, float, 280)), Some(expected(2, raw, 280))].map(|other| {
                let waiting = Waiting::default();
                let _first = waiting.wait(&file.content, Some(expected(1, raw, 280)));
                assert!(!waiting.wait(&file.content, other.clone()).1);
                wait(other).0
            });
        let (mut same, is_asked_for) = wait(Some(expected(1, raw, 280)));
        assert!(is_asked_for);
        // It would be ended by a file, of which the size is not known before.
        let (mut lies, is_asked_for) = wait(Some(expected(1, raw, 560)));
        assert!(is_asked_for);
        assert_eq!(waiting.expected(&MmHash::new([1; 32])).len(), 4);
        assert_eq!(waiting.expected(&MmHash::new([3; 32])).len(), 0);
        waiting.pixels_came(&expected(1, raw, 280), &Bytes::new());
        assert_eq!([&mut first, &mut same].map(came), [Some("pixels"); 2]);
        assert_eq!(came(&mut lies), None);
        assert_eq!(others.each_mut().map(came), [None; 3]);
        waiting.file_came(&file);
        assert_eq!(came(&mut lies), Some("file"));
        assert_eq!(others.each_mut().map(came), [Some("file"); 3]);
        assert!(is_empty(&waiting));
    }

    #[test]
    fn who_does_not_wait_any_more_is_forgotten() {
        let content = ContentHash::new([7; 32]);
        let waiting = Waiting::default();
        let of = |hash| waiting.wait(&content, Some(expected(hash, TensorFormat::Raw, 280))).0;
        let (one, same, other) = (of(1), of(1), of(2));
        drop(one);
        assert_eq!(waiting.expected(&MmHash::new([1; 32])).len(), 1);
        drop(same);
        assert!(waiting.expected(&MmHash::new([1; 32])).is_empty());
        assert_eq!(waiting.expected(&MmHash::new([2; 32])).len(), 1);
        drop(other);
        assert!(is_empty(&waiting));
        // Nobody is there to be told.
        waiting.pixels_came(&expected(1, TensorFormat::Raw, 280), &Bytes::new());
    }
}
