use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_transfer::{Slot, SlotWriter};
use chiasm_types::{Dtype, TensorField};
use futures_util::future::BoxFuture;

use crate::{SourceError, TensorFormat};

/// Where a media item can be had, in the form that a backend asks for. Made by whoever planned the
/// item; asked only for items that the backend lacks.
pub trait MediaSource: Send + Sync {
    /// The item's tensors, large ones in the memory that the order names. Waits for whoever makes
    /// the same tensors now and uses theirs. `None` if they were not wanted any more when the turn
    /// came.
    fn tensors(
        &self,
        order: TensorOrder,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>>;

    /// The item as the client sent it. `None` if that and its settings don't say what it becomes.
    fn encoded(&self) -> Option<EncodedItem>;

    /// What it takes to make the item's tensors here, for who could also have them made elsewhere
    /// of the file. `None` if they can only be made here, or only elsewhere.
    fn making(&self, _format: TensorFormat) -> Option<Making> {
        None
    }
}

/// What it takes to make an image's tensors of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Making {
    /// Width and height of the image in pixels. With the file's hash and its settings they say what
    /// tensors it becomes.
    pub size: (u32, u32),
    /// Bytes of the tensor of pixels.
    pub bytes: u64,
    /// Time of one core, by estimate.
    pub price: Duration,
    /// How large a piece of work that is.
    pub work: WorkSize,
    /// Whether a thread of this process would begin with it at once.
    pub at_once: bool,
}

chiasm_types::every_variant! {
    /// How large a piece of CPU-heavy work is. Smaller ones wait for no larger ones.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum WorkSize {
        /// Some milliseconds of one core at most.
        Short,
        /// What images mostly take.
        Usual,
        /// Very large images.
        Heavy,
    }
}

/// What a machine has to do with media items.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaLoad {
    /// Threads that do it.
    pub threads: u32,
    /// Time of one core, by estimate, of what waits or is being done: of each [`WorkSize`], the
    /// smallest first.
    pub pending: [Duration; WorkSize::ALL.len()],
}

impl MediaLoad {
    /// How long a piece of work of this size and price would wait for a thread, if what is before
    /// it consists of as large ones: as many of them as there are threads but one keep nobody
    /// waiting.
    pub fn wait(&self, work: WorkSize, price: Duration) -> Duration {
        let threads = self.threads.max(1);
        let before: Duration = self.pending[..=work as usize].iter().sum();
        before.saturating_sub(price.saturating_mul(threads - 1)) / threads
    }

    /// All that waits or is being done.
    pub fn all(&self) -> Duration {
        self.pending.iter().sum()
    }
}

/// An item as the client sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedItem {
    /// The file.
    pub bytes: Bytes,
    /// blake3 of it.
    pub content: [u8; 32],
    /// The media type found from the bytes, such as `image/jpeg`.
    pub media_type: &'static str,
    /// The request's settings for its processor, as a JSON object.
    pub processor_kwargs: Arc<str>,
    /// Where it was had, if at an `http:` or `https:` URL. May hold secrets.
    pub url: Option<Arc<str>>,
}

/// What a backend wants of a source.
#[derive(Clone)]
pub struct TensorOrder {
    /// What the values are to be.
    pub format: TensorFormat,
    /// Where large tensors are to lie.
    pub memory: Arc<dyn TensorMemory>,
    /// Whether the backend still lacks the item: asked when the source's turn to make it has come,
    /// as the backend may have got the item with another request meanwhile.
    pub still_wanted: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// Memory that a backend hands tensors over from.
pub trait TensorMemory: Send + Sync {
    /// Room for one tensor. `None` if it is to lie in this process's memory: the backend has no
    /// other, or no room in it.
    fn reserve(&self, bytes: usize) -> Option<SlotWriter>;

    /// Whether the backend can hand these bytes over from where they are.
    fn takes(&self, bytes: &TensorBytes) -> bool;
}

/// One named argument of the model for an item.
#[derive(Clone, Debug)]
pub struct ItemField {
    /// The name, for instance `pixel_values`.
    pub name: Cow<'static, str>,
    /// How the engine joins it with the same field of other items.
    pub field: TensorField,
    /// What it is.
    pub value: FieldValue,
}

/// The value of a field: vLLM's `NestedTensors`.
#[derive(Clone, Debug)]
pub enum FieldValue {
    /// A tensor.
    Tensor(Tensor),
    /// A whole number.
    Int(i64),
    /// A number.
    Float(f64),
    /// Several values.
    List(Vec<FieldValue>),
}

/// A tensor. Its elements lie densely, last dimension fastest, little-endian.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// Element type.
    pub dtype: Dtype,
    /// Extents.
    pub shape: Vec<usize>,
    /// The elements.
    pub bytes: TensorBytes,
}

/// A tensor's elements, where they lie.
#[derive(Clone, Debug)]
pub enum TensorBytes {
    /// The elements lie in this process's own memory.
    Here(Bytes),
    /// The elements lie in shared memory that an engine maps.
    Slot(Slot),
}

impl AsRef<[u8]> for TensorBytes {
    fn as_ref(&self) -> &[u8] {
        match self {
            Self::Here(bytes) => bytes,
            Self::Slot(slot) => slot,
        }
    }
}

/// Numbers of items by the way that they took, over all continuations of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delivered {
    /// Items that the backend held.
    pub cached: usize,
    /// Items with a tensor in shared memory.
    pub shared_memory: usize,
    /// Items that were wholly in the message.
    pub inline: usize,
    /// So many of them had embeddings that were to be found on the backend's machine and were not,
    /// as far as it can tell.
    pub unfound: usize,
}

impl Delivered {
    /// The costliest way that any item took.
    pub fn transfer(self) -> Transfer {
        match self {
            Self { inline: 1.., .. } => Transfer::Inline,
            Self { shared_memory: 1.., .. } => Transfer::SharedMemory,
            Self { cached: 1.., .. } => Transfer::Cached,
            Self { .. } => Transfer::None,
        }
    }
}

impl std::ops::AddAssign for Delivered {
    fn add_assign(&mut self, other: Self) {
        let Self { cached, shared_memory, inline, unfound } = other;
        self.cached += cached;
        self.shared_memory += shared_memory;
        self.inline += inline;
        self.unfound += unfound;
    }
}

/// How the tensors of media items reach a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// There are no media items.
    None,
    /// Nothing travelled: the backend held every item.
    Cached,
    /// At least one item went in shared memory, and none inside the message.
    SharedMemory,
    /// At least one item went inside the message.
    Inline,
}

impl Transfer {
    /// The name in headers, metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cached => "cached",
            Self::SharedMemory => "shm",
            Self::Inline => "inline",
        }
    }
}

/// How an item is sent to another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SentForm {
    /// The file that the client sent.
    Encoded,
    /// The tensors that are made of it.
    Tensors,
}

impl SentForm {
    /// The name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Encoded => "encoded",
            Self::Tensors => "tensors",
        }
    }
}

/// Is told what happens to media on its way to backends: for counters and logs.
pub trait MediaObserver: Send + Sync {
    /// Items were handed over so.
    fn delivered(&self, delivered: Delivered);

    /// The backend lacked so many items that it was believed to hold; they are sent again.
    fn missed(&self, items: usize);

    /// So many bytes of a file or of tensors were sent to another machine, which lacked them.
    fn sent(&self, _bytes: u64) {}

    /// An item was sent to another machine in this form.
    fn sent_as(&self, _form: SentForm) {}

    /// So many bytes of tensors were read out of this process's memory by another machine, which
    /// lacked them.
    fn lent(&self, _bytes: u64) {}

    /// An item that was to travel in shared memory or as tensors does not, or one that was to be
    /// fetched or read elsewhere is sent. `cause` is one of a few words, `why` explains it to
    /// people.
    fn stepped_down(&self, cause: &'static str, why: &dyn fmt::Display);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_waits_for_what_is_not_larger_once_all_threads_have_some() {
        let ms = Duration::from_millis;
        let load = |threads, pending: [u64; 3]| MediaLoad { threads, pending: pending.map(ms) };
        let wait = |threads, pending, work| load(threads, pending).wait(work, ms(40));
        assert_eq!(wait(4, [0; 3], WorkSize::Usual), ms(0));
        // Three of four threads are busy, then all of them twice.
        assert_eq!(wait(4, [0, 120, 0], WorkSize::Usual), ms(0));
        assert_eq!(wait(4, [0, 320, 0], WorkSize::Usual), ms(50));
        assert_eq!(wait(1, [0, 40, 0], WorkSize::Usual), ms(40));
        // Threads give way to smaller work.
        assert_eq!(wait(1, [3, 20, 900], WorkSize::Short), ms(3));
        assert_eq!(wait(1, [3, 20, 900], WorkSize::Usual), ms(23));
        assert_eq!(wait(1, [3, 20, 900], WorkSize::Heavy), ms(923));
        // What another process says may be anything.
        assert_eq!(wait(0, [0, 20, 0], WorkSize::Usual), ms(20));
        assert_eq!(load(4, [1, 2, 3]).all(), ms(6));
    }

    #[test]
    fn the_costliest_way_names_a_jobs_transfer() {
        let ways = |cached, shared_memory, inline| {
            Delivered { cached, shared_memory, inline, unfound: 0 }.transfer().name()
        };
        assert_eq!(
            [ways(0, 0, 0), ways(3, 0, 0), ways(3, 1, 0), ways(3, 1, 1)],
            ["none", "cached", "shm", "inline"]
        );
    }
}
