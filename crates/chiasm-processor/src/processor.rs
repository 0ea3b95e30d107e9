//! The processor, and the queue in front of its children.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::child::Child;
use crate::item::ItemDescription;
use crate::message::{Call, ChatCall, ExpandedPrompt, Greeting, KnownItem, Reply};
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
    admission: Semaphore,
    items: Children,
    /// Separate, so that prompts never wait for items. A prompt takes milliseconds at most.
    prompts: Children,
}

/// The children for one kind of call.
struct Children {
    /// One permit for each child that may be busy.
    permits: Semaphore,
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
        let children =
            |count: usize| Children { permits: Semaphore::new(count), idle: Mutex::default() };
        let inner = Inner {
            greeting,
            supervisor,
            admission: Semaphore::new(options.children + options.queue),
            items: children(options.children),
            prompts: children(options.children),
            options,
        };
        Ok(Self { inner: Arc::new(inner) })
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
        let inner = &self.inner;
        let _admission = inner.admission.try_acquire().map_err(|_| ProcessorError::QueueFull)?;
        let _permit = inner.items.acquire().await?;
        let ItemCall { modality, file, processor_kwargs, io_kwargs } = call;
        let length = file.len() as u64;
        let child = inner.take_or_fork(&inner.items).await?;
        let memory = match child.allocate(file, inner.options.item_bytes).await {
            Ok(memory) => memory,
            Err(error) => {
                inner.items.put_back(child);
                let reason = format!("no memory for an item: {error}");
                return Err(ProcessorError::Unavailable(reason));
            }
        };
        let call = Call::Item { modality, length, processor_kwargs, io_kwargs };
        inner
            .call(child, &inner.items, &call, memory.file(), |reply| match reply {
                Reply::Made { fields, updates } => {
                    ItemDescription::validate(&memory, fields, updates)
                }
                _ => Err(unexpected_reply("an item")),
            })
            .await
            .map(|description| description.with_memory(memory))
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
        let _permit = inner.prompts.acquire().await?;
        let child = inner.take_or_fork(&inner.prompts).await?;
        inner
            .call(child, &inner.prompts, call, None, |reply| match reply {
                Reply::Expanded(prompt) => prompt.validate(items),
                _ => Err(unexpected_reply("a prompt")),
            })
            .await
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

    /// Calls a child and validates its reply. A child whose reply is invalid is not used again.
    async fn call<T>(
        &self,
        mut child: Child,
        children: &Children,
        call: &Call<'_>,
        memory: Option<BorrowedFd<'_>>,
        validate: impl FnOnce(Reply) -> Result<T, ProcessorError>,
    ) -> Result<T, ProcessorError> {
        let outcome = child.call(call, memory, self.options.timeout).await.and_then(validate);
        // In any other case the child is dropped, which kills it.
        if matches!(outcome, Ok(_) | Err(ProcessorError::Refused(_))) {
            children.put_back(child);
        }
        outcome
    }
}

impl Children {
    /// Waits until a child may be used.
    async fn acquire(&self) -> Result<tokio::sync::SemaphorePermit<'_>, ProcessorError> {
        self.permits.acquire().await.map_err(|_| ProcessorError::QueueFull)
    }

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

fn unexpected_reply(call: &str) -> ProcessorError {
    ProcessorError::InvalidReply(format!("not a reply to {call}"))
}
