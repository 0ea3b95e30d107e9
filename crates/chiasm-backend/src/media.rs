use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_transfer::{Slot, SlotWriter};
use chiasm_types::{Dtype, TensorField};
use futures_util::future::BoxFuture;

use crate::{CuttableVideo, SourceError, TensorFormat};

/// The source of a media item, in the form that a backend requests.
///
/// The planner of the item creates the source. Backends only use it for items that they lack.
pub trait MediaSource: Send + Sync {
    /// Returns the item's tensors, with large tensors in the memory that the request names.
    /// Concurrent requests for the same tensors share one computation. `None` if the tensors were
    /// no longer needed when the computation could start.
    fn tensors(
        &self,
        request: TensorRequest,
    ) -> BoxFuture<'_, Result<Option<Vec<ItemField>>, SourceError>>;

    /// Returns the item as the client sent it. `None` if the file and its settings do not determine
    /// the tensors.
    fn encoded(&self) -> Option<EncodedItem>;

    /// Returns the cost of making the item's tensors in this process, for backends that could also
    /// make them from the file. `None` if there is no such choice: only this process, or only the
    /// backend, can make them.
    fn processing_cost(&self, _format: TensorFormat) -> Option<ProcessingCost> {
        None
    }

    /// Returns the item as a video that another machine can decode from a cut, if it is one.
    fn cuttable(&self) -> Option<&dyn CuttableVideo> {
        None
    }
}

/// The cost of making an image's tensors from its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessingCost {
    /// The width and height of the image in pixels. With the file's hash and its settings, they
    /// determine the tensors.
    pub image_size: (u32, u32),
    /// The bytes of the tensor of pixels.
    pub tensor_bytes: u64,
    /// The estimated CPU time on one core.
    pub cpu_time: Duration,
    /// The size class of the work.
    pub work_size: WorkSize,
    /// `true` if a thread of this process can start the work immediately.
    pub starts_immediately: bool,
}

chiasm_types::every_variant! {
    /// The size class of CPU-heavy work. Smaller work never waits for larger work.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum WorkSize {
        /// At most some milliseconds of one core.
        Short,
        /// The usual work for an image.
        Usual,
        /// Very large images.
        Heavy,
    }
}

/// The queued and running media work of a machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaLoad {
    /// The number of worker threads.
    pub threads: u32,
    /// The estimated CPU time on one core of queued and running work, per [`WorkSize`], the
    /// smallest first.
    pub pending: [Duration; WorkSize::ALL.len()],
}

impl MediaLoad {
    /// Estimates the time that new work waits for a thread.
    ///
    /// The estimate assumes that each piece of queued work also takes `cpu_time`. Then `threads -
    /// 1` pieces leave one thread free and cause no wait.
    pub fn estimated_wait(&self, work_size: WorkSize, cpu_time: Duration) -> Duration {
        let threads = self.threads.max(1);
        let queued: Duration = self.pending[..=work_size as usize].iter().sum();
        queued.saturating_sub(cpu_time.saturating_mul(threads - 1)) / threads
    }

    /// Returns the total of queued and running work.
    pub fn total(&self) -> Duration {
        self.pending.iter().sum()
    }
}

/// An item as the client sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncodedItem {
    /// The file.
    pub bytes: Bytes,
    /// The blake3 hash of the file.
    pub content: [u8; 32],
    /// The media type, detected from the bytes, such as `image/jpeg`.
    pub media_type: &'static str,
    /// The request's settings for its processor, as a JSON object.
    pub processor_kwargs: Arc<str>,
    /// The `http:` or `https:` URL of the file, if it was fetched. May contain secrets.
    pub url: Option<Arc<str>>,
}

/// A backend's request to a [`MediaSource`].
#[derive(Clone)]
pub struct TensorRequest {
    /// The format of the values.
    pub format: TensorFormat,
    /// The element type of the engine's model, to which vLLM converts an item's small floats in
    /// every format. `None` if the backend does not know the engine: only a source that knows which
    /// tensors engines need can make them then.
    pub model_dtype: Option<Dtype>,
    /// The memory for large tensors.
    pub memory: Arc<dyn TensorMemory>,
    /// Returns `true` if the backend still lacks the item. Called when the computation can start,
    /// because the backend may have received the item with another request in the meantime.
    pub is_still_needed: Arc<dyn Fn() -> bool + Send + Sync>,
}

/// The memory from which a backend hands tensors over.
pub trait TensorMemory: Send + Sync {
    /// Reserves room for a tensor. `None` if the tensor belongs in this process's own memory: the
    /// backend has no other memory, or no room in it.
    fn reserve(&self, bytes: usize) -> Option<SlotWriter>;

    /// Returns `true` if the backend can hand these bytes over without copying them first.
    fn takes(&self, bytes: &TensorBytes) -> bool;
}

/// A named argument of the model for an item.
#[derive(Clone, Debug)]
pub struct ItemField {
    /// The name, for instance `pixel_values`.
    pub name: Cow<'static, str>,
    /// The way the engine joins it with the same field of other items.
    pub field: TensorField,
    /// The value.
    pub value: FieldValue,
}

/// The value of a field: vLLM's `NestedTensors`.
#[derive(Clone, Debug)]
pub enum FieldValue {
    /// A tensor.
    Tensor(Tensor),
    /// An integer.
    Int(i64),
    /// A floating-point number.
    Float(f64),
    /// A list of values.
    List(Vec<FieldValue>),
}

/// A tensor. Its elements are dense, row-major (last dimension fastest) and little-endian.
#[derive(Clone, Debug)]
pub struct Tensor {
    /// The element type.
    pub dtype: Dtype,
    /// The extents of the dimensions.
    pub shape: Vec<usize>,
    /// The elements.
    pub bytes: TensorBytes,
}

/// The elements of a tensor.
#[derive(Clone, Debug)]
pub enum TensorBytes {
    /// Elements in this process's own memory.
    Here(Bytes),
    /// Elements in shared memory that an engine maps.
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

/// The number of media items by the way they reached the backend, over all continuations of a job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MediaDelivery {
    /// Items that the backend already held.
    pub cached: usize,
    /// Items with a tensor in shared memory.
    pub shared_memory: usize,
    /// Items whose tensors were all in the message.
    pub inline: usize,
    /// Items of any kind above whose embeddings should have been on the backend's machine and were
    /// not found, as far as the backend can tell.
    pub unfound: usize,
}

impl MediaDelivery {
    /// Returns the most expensive way that any item took.
    pub fn transfer(self) -> Transfer {
        match self {
            Self { inline: 1.., .. } => Transfer::Inline,
            Self { shared_memory: 1.., .. } => Transfer::SharedMemory,
            Self { cached: 1.., .. } => Transfer::Cached,
            Self { .. } => Transfer::None,
        }
    }
}

impl std::ops::AddAssign for MediaDelivery {
    fn add_assign(&mut self, other: Self) {
        let Self { cached, shared_memory, inline, unfound } = other;
        self.cached += cached;
        self.shared_memory += shared_memory;
        self.inline += inline;
        self.unfound += unfound;
    }
}

/// The way the tensors of media items reach a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Transfer {
    /// There are no media items.
    None,
    /// No tensor was sent: the backend held every item.
    Cached,
    /// At least one item was sent in shared memory, and none in the message.
    SharedMemory,
    /// At least one item was sent in the message.
    Inline,
}

impl Transfer {
    /// Returns the name in headers, metrics and reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Cached => "cached",
            Self::SharedMemory => "shm",
            Self::Inline => "inline",
        }
    }
}

/// The form in which an item is sent to another machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SentForm {
    /// The file that the client sent.
    Encoded,
    /// The tensors made from the file.
    Tensors,
    /// The part of a video's file that has the wanted frames.
    Cut,
}

impl SentForm {
    /// Returns the name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Encoded => "encoded",
            Self::Tensors => "tensors",
            Self::Cut => "cut",
        }
    }
}

/// An observer of media items on their way to backends, for counters and logs.
pub trait MediaObserver: Send + Sync {
    /// Called when items were handed over.
    fn delivered(&self, delivered: MediaDelivery);

    /// Called when the backend lacked `items` items that the mirror of its receiver cache contains.
    /// They are sent again.
    fn missed(&self, items: usize);

    /// Called when `bytes` bytes of a file, of a cut or of tensors were sent to another machine,
    /// which lacked them.
    fn sent(&self, _bytes: u64) {}

    /// Called when an item was sent to another machine in this form.
    fn sent_as(&self, _form: SentForm) {}

    /// Called when another machine, which lacked them, has read `bytes` bytes of tensors from this
    /// process's memory.
    fn lent(&self, _bytes: u64) {}

    /// Called when an item takes a slower way than planned: not in shared memory, not as tensors,
    /// or sent instead of being fetched or read by the other machine. `cause` is one of a few words
    /// for metrics; `reason` explains it to operators.
    fn stepped_down(&self, cause: &'static str, reason: &dyn fmt::Display);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_waits_for_smaller_or_equal_work_on_busy_threads() {
        let ms = Duration::from_millis;
        let load = |threads, pending: [u64; 3]| MediaLoad { threads, pending: pending.map(ms) };
        let wait =
            |threads, pending, work_size| load(threads, pending).estimated_wait(work_size, ms(40));
        assert_eq!(wait(4, [0; 3], WorkSize::Usual), ms(0));
        // Three of four threads are busy, then all of them twice.
        assert_eq!(wait(4, [0, 120, 0], WorkSize::Usual), ms(0));
        assert_eq!(wait(4, [0, 320, 0], WorkSize::Usual), ms(50));
        assert_eq!(wait(1, [0, 40, 0], WorkSize::Usual), ms(40));
        // Threads give way to smaller work.
        assert_eq!(wait(1, [3, 20, 900], WorkSize::Short), ms(3));
        assert_eq!(wait(1, [3, 20, 900], WorkSize::Usual), ms(23));
        assert_eq!(wait(1, [3, 20, 900], WorkSize::Heavy), ms(923));
        // The number of threads is another process's report and may be anything.
        assert_eq!(wait(0, [0, 20, 0], WorkSize::Usual), ms(20));
        assert_eq!(load(4, [1, 2, 3]).total(), ms(6));
    }

    #[test]
    fn most_expensive_way_names_the_transfer() {
        let ways = |cached, shared_memory, inline| {
            MediaDelivery { cached, shared_memory, inline, unfound: 0 }.transfer().name()
        };
        assert_eq!(
            [ways(0, 0, 0), ways(3, 0, 0), ways(3, 1, 0), ways(3, 1, 1)],
            ["none", "cached", "shm", "inline"]
        );
    }
}
