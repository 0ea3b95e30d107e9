//! The queue before the children.

use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use serde_json::{Map, Value};
use tokio::sync::Semaphore;

use crate::child::Child;
use crate::item::ItemParts;
use crate::message::{Call, ChatCall, ExpandedPrompt, Greeting, KnownItem, Reply};
use crate::server::Server;
use crate::supervisor::Supervisor;
use crate::{MadeItem, ProcessorError, ProcessorOptions};

/// An item to be made.
#[derive(Clone, Debug)]
pub struct ItemCall<'a> {
    /// The modality, by vLLM's name.
    pub modality: &'a str,
    /// The file.
    pub file: Bytes,
    /// `mm_processor_kwargs` of the request.
    pub processor_kwargs: &'a Map<String, Value>,
    /// `media_io_kwargs` of the request: an object for each modality that it names.
    pub io_kwargs: &'a Map<String, Value>,
}

/// A model's processor, in processes of its own. Clones are the same one; the processes end with
/// the last.
#[derive(Clone)]
pub struct Processor {
    inner: Arc<Inner>,
}

struct Inner {
    options: ProcessorOptions,
    greeting: Greeting,
    server: Supervisor,
    /// Those who have a child or wait for one.
    places: Semaphore,
    items: Children,
    /// Prompts take milliseconds at most, and do not wait for items.
    prompts: Children,
}

/// Children for one kind of call.
struct Children {
    turns: Semaphore,
    idle: Mutex<Vec<Child>>,
}

impl Processor {
    /// Starts the fork server and waits until it is ready: some ten seconds, or half a minute with
    /// a model that this user's vLLM has never seen. Must be called within a tokio runtime.
    ///
    /// # Errors
    /// [`ProcessorError::NoPython`], [`ProcessorError::NotServed`] with the reason,
    /// [`ProcessorError::Gone`].
    pub async fn start(options: ProcessorOptions) -> Result<Self, ProcessorError> {
        let (server, greeting) = Supervisor::start(&options).await?;
        let children =
            |count: usize| Children { turns: Semaphore::new(count), idle: Mutex::default() };
        let inner = Inner {
            greeting,
            server,
            places: Semaphore::new(options.children + options.queue),
            items: children(options.children),
            prompts: children(options.children),
            options,
        };
        Ok(Self { inner: Arc::new(inner) })
    }

    /// What the processor has said of itself.
    pub fn greeting(&self) -> &Greeting {
        &self.inner.greeting
    }

    /// Makes an item's tensors, in memory that is the caller's then. Dropping the future ends the
    /// work.
    ///
    /// # Errors
    /// All of [`ProcessorError`].
    pub async fn item(&self, call: ItemCall<'_>) -> Result<MadeItem, ProcessorError> {
        let inner = &self.inner;
        let _place = inner.places.try_acquire().map_err(|_| ProcessorError::Busy)?;
        let _turn = inner.items.turn().await?;
        let ItemCall { modality, file, processor_kwargs, io_kwargs } = call;
        let length = file.len() as u64;
        let child = inner.child(&inner.items).await?;
        let memory = match child.memory(file, inner.options.item_bytes).await {
            Ok(memory) => memory,
            Err(error) => {
                inner.items.put_back(child);
                return Err(ProcessorError::Gone(format!("no memory for an item: {error}")));
            }
        };
        let call = Call::Item { modality, length, processor_kwargs, io_kwargs };
        inner
            .ask(child, &inner.items, &call, memory.file(), |reply| match reply {
                Reply::Made { fields, updates } => ItemParts::new(&memory, fields, updates),
                _ => Err(ProcessorError::Nonsense("another answer than to an item".to_owned())),
            })
            .await
            .map(|parts| parts.with(memory))
    }

    /// Writes items out in a prompt, as vLLM does it for items that it has.
    ///
    /// # Errors
    /// All of [`ProcessorError`].
    pub async fn prompt(
        &self,
        tokens: &[u32],
        items: &[KnownItem<'_>],
        processor_kwargs: &Map<String, Value>,
    ) -> Result<ExpandedPrompt, ProcessorError> {
        self.expanded(&Call::Prompt { token_ids: tokens, items, processor_kwargs }, items.len())
            .await
    }

    /// Writes a conversation as vLLM does it by code, if [`Greeting::writes_conversations`].
    ///
    /// # Errors
    /// All of [`ProcessorError`].
    pub async fn chat(&self, call: ChatCall<'_>) -> Result<ExpandedPrompt, ProcessorError> {
        self.expanded(&Call::Chat(call), call.items.len()).await
    }

    async fn expanded(
        &self,
        call: &Call<'_>,
        items: usize,
    ) -> Result<ExpandedPrompt, ProcessorError> {
        let inner = &self.inner;
        let _turn = inner.prompts.turn().await?;
        let child = inner.child(&inner.prompts).await?;
        inner
            .ask(child, &inner.prompts, call, None, |reply| match reply {
                Reply::Expanded(prompt) => prompt.checked(items),
                _ => Err(ProcessorError::Nonsense("another answer than to a prompt".to_owned())),
            })
            .await
    }
}

impl Inner {
    /// A child that waits for work, or a new one.
    async fn child(&self, children: &Children) -> Result<Child, ProcessorError> {
        let server = self.server.server().await?;
        match children.idle(&server) {
            Some(child) => Ok(child),
            None => server.fork().await,
        }
    }

    /// What `read` makes of a child's answer. Whoever answers nonsense is not asked again.
    async fn ask<T>(
        &self,
        mut child: Child,
        children: &Children,
        call: &Call<'_>,
        memory: Option<BorrowedFd<'_>>,
        read: impl FnOnce(Reply) -> Result<T, ProcessorError>,
    ) -> Result<T, ProcessorError> {
        let outcome = child.call(call, memory, self.options.timeout).await.and_then(read);
        // Others are dropped, and end.
        if matches!(outcome, Ok(_) | Err(ProcessorError::Refused(_))) {
            children.put_back(child);
        }
        outcome
    }
}

impl Children {
    async fn turn(&self) -> Result<tokio::sync::SemaphorePermit<'_>, ProcessorError> {
        self.turns.acquire().await.map_err(|_| ProcessorError::Busy)
    }

    /// Takes an idle child of this server. Children of earlier servers end.
    fn idle(&self, server: &Arc<Server>) -> Option<Child> {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.retain(|child| child.is_of(server));
        while let Some(child) = idle.pop() {
            if child.is_idle() {
                return Some(child);
            }
        }
        None
    }

    /// Keeps a child for the next call, unless its server is replaced.
    fn put_back(&self, child: Child) {
        if child.has_lost_server() {
            return;
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(child);
    }
}
