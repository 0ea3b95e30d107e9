//! The processor, and the queue in front of its children.

use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use serde_json::{Map, Value};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::child::{Child, TimeBudget};
use crate::greeting::Greeting;
use crate::item::ItemDescription;
use crate::memory::Memory;
use crate::message::{Call, ChatCall, ExpandedPrompt, KnownItem, Reply};
use crate::server::Server;
use crate::supervisor::Supervisor;
use crate::{ItemOutput, ProcessorError, ProcessorOptions};

/// A call that makes the tensors of an item.
#[derive(Clone, Debug)]
pub struct ItemCall<'a> {
    /// The modality, by vLLM's name.
    pub modality: &'a str,
    /// The contents of the item's file.
    pub file: Bytes,
    /// `mm_processor_kwargs` of the request.
    pub processor_kwargs: &'a Map<String, Value>,
    /// `media_io_kwargs` of the request: one object per modality.
    pub io_kwargs: &'a Map<String, Value>,
}

/// A model's processor, which runs in separate processes. Clones share the processes, which end
/// with the last clone.
#[derive(Clone)]
pub struct Processor {
    inner: Arc<Inner>,
}

struct Inner {
    options: ProcessorOptions,
    greeting: Greeting,
    supervisor: Supervisor,
    /// Bounds the items that have a child or wait for one.
    admission: Arc<Semaphore>,
    items: Children,
    /// Separate, so that prompts never wait for items. A prompt takes milliseconds at most.
    prompts: Children,
}

/// The children for one kind of call.
struct Children {
    /// One permit for each child that may be busy.
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Child>>,
}

impl Processor {
    /// Starts the fork server and waits until it is ready. That takes about 10 s, or 30 s the first
    /// time this user's vLLM sees the model. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`ProcessorError::NoPython`], [`ProcessorError::Unsupported`] with the reason,
    /// [`ProcessorError::Unavailable`].
    pub async fn start(options: ProcessorOptions) -> Result<Self, ProcessorError> {
        let (supervisor, greeting) = Supervisor::start(&options).await?;
        let children = |count: usize| Children {
            permits: Arc::new(Semaphore::new(count)),
            idle: Mutex::default(),
        };
        let inner = Inner {
            greeting,
            supervisor,
            admission: Arc::new(Semaphore::new(options.children + options.queue)),
            items: children(options.children),
            prompts: children(options.children),
            options,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Returns the maximum size of an item's file and tensors together.
    pub(crate) fn item_bytes(&self) -> u64 {
        self.inner.options.item_bytes
    }

    /// Returns the properties of the processor.
    pub fn greeting(&self) -> &Greeting {
        &self.inner.greeting
    }

    /// Makes an item's tensors. The caller owns the returned memory. Dropping the future aborts the
    /// call and kills the child.
    ///
    /// # Errors
    /// Any [`ProcessorError`].
    pub async fn item(&self, call: ItemCall<'_>) -> Result<ItemOutput, ProcessorError> {
        let lease = self.lease_child().await?;
        let ItemCall { modality, file, processor_kwargs, io_kwargs } = call;
        let length = file.len() as u64;
        let (mut lease, memory) = lease.allocate(vec![file]).await?;
        let call = Call::Item { modality, length, processor_kwargs, io_kwargs };
        let mut budget = lease.budget();
        let reply = lease.child.call(&call, memory.file(), &mut budget).await;
        let outcome = reply.and_then(|reply| match reply {
            Reply::Made { fields, updates } => ItemDescription::validate(&memory, fields, updates),
            _ => Err(unexpected_reply("an item")),
        });
        if may_be_reused(&outcome) {
            lease.give_back();
        }
        outcome.map(|description| description.with_memory(memory))
    }

    /// Waits for a child that makes items. The number of waiting calls is bounded.
    pub(crate) async fn lease_child(&self) -> Result<ChildLease, ProcessorError> {
        let inner = self.inner.clone();
        let admission = inner.admission.clone().try_acquire_owned();
        let admission = admission.map_err(|_| ProcessorError::QueueFull)?;
        let permit = inner.items.permits.clone().acquire_owned().await;
        let permit = permit.map_err(|_| ProcessorError::QueueFull)?;
        let child = inner.take_or_fork(&inner.items).await?;
        Ok(ChildLease { child, inner, _permit: permit, _admission: admission })
    }

    /// Expands the items of a prompt, as vLLM does for items in its cache.
    ///
    /// # Errors
    /// Any [`ProcessorError`].
    pub async fn prompt(
        &self,
        tokens: &[u32],
        items: &[KnownItem<'_>],
        processor_kwargs: &Map<String, Value>,
    ) -> Result<ExpandedPrompt, ProcessorError> {
        let call = Call::Prompt { token_ids: tokens, items, processor_kwargs };
        self.expand(&call, items.len()).await
    }

    /// Writes a conversation with vLLM's code. Requires [`Greeting::writes_conversations`].
    ///
    /// # Errors
    /// Any [`ProcessorError`].
    pub async fn chat(&self, call: ChatCall<'_>) -> Result<ExpandedPrompt, ProcessorError> {
        self.expand(&Call::Chat(call), call.items.len()).await
    }

    async fn expand(
        &self,
        call: &Call<'_>,
        items: usize,
    ) -> Result<ExpandedPrompt, ProcessorError> {
        let inner = &self.inner;
        let permit = inner.prompts.permits.acquire().await;
        let _permit = permit.map_err(|_| ProcessorError::QueueFull)?;
        let mut child = inner.take_or_fork(&inner.prompts).await?;
        let mut budget = TimeBudget::new(inner.options.timeout);
        let reply = child.call(call, None, &mut budget).await;
        let outcome = reply.and_then(|reply| match reply {
            Reply::Expanded(prompt) => prompt.validate(items),
            _ => Err(unexpected_reply("a prompt")),
        });
        if may_be_reused(&outcome) {
            inner.prompts.put_back(child);
        }
        outcome
    }
}

/// A child that makes items, with its place among the calls that run. Dropping it kills the child.
pub(crate) struct ChildLease {
    pub(crate) child: Child,
    inner: Arc<Inner>,
    _permit: OwnedSemaphorePermit,
    _admission: OwnedSemaphorePermit,
}

impl ChildLease {
    /// Allocates memory for an item that begins with the item's file, given in pieces.
    pub(crate) async fn allocate(
        self,
        pieces: Vec<Bytes>,
    ) -> Result<(Self, Memory), ProcessorError> {
        match self.child.allocate(pieces, self.inner.options.item_bytes).await {
            Ok(memory) => Ok((self, memory)),
            Err(error) => {
                self.give_back();
                let reason = format!("no memory for an item: {error}");
                Err(ProcessorError::Unavailable(reason))
            }
        }
    }

    /// Returns the time that the child may take for a call.
    pub(crate) fn budget(&self) -> TimeBudget {
        TimeBudget::new(self.inner.options.timeout)
    }

    /// Keeps the child for the next call. It must not be in the middle of one.
    pub(crate) fn give_back(self) {
        let Self { child, inner, _permit, _admission } = self;
        inner.items.put_back(child);
    }
}

impl Inner {
    /// Returns an idle child, or forks a new one.
    async fn take_or_fork(&self, children: &Children) -> Result<Child, ProcessorError> {
        let server = self.supervisor.running_server().await?;
        match children.take_idle(&server) {
            Some(child) => Ok(child),
            None => server.fork().await,
        }
    }
}

impl Children {
    /// Takes an idle child of this server. Drops the children of earlier servers, which kills them.
    fn take_idle(&self, server: &Arc<Server>) -> Option<Child> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|child| child.belongs_to(server));
        while let Some(child) = idle.pop() {
            if child.is_idle() {
                return Some(child);
            }
        }
        None
    }

    /// Keeps a child for the next call, unless its server is being replaced.
    fn put_back(&self, child: Child) {
        if child.has_lost_server() {
            return;
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(child);
    }
}

/// Returns `true` if a child may be used again after this outcome of a call. After any other error
/// it is dropped, which kills it.
fn may_be_reused<T>(outcome: &Result<T, ProcessorError>) -> bool {
    matches!(outcome, Ok(_) | Err(ProcessorError::Refused(_)))
}

pub(crate) fn unexpected_reply(call: &str) -> ProcessorError {
    ProcessorError::InvalidReply(format!("not a reply to {call}"))
}
