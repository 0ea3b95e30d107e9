//! The backend of one server.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, DeathReason, ForwardRequest, ForwardResponse,
    Job, JobError, KvSink, LoadSink, MediaObserver, MemoryUsage, RunningJob,
};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::StreamExt;
use tokio::task::JoinSet;

use crate::plain;
use crate::request;
use crate::running::RunningUpstreamJob;
use crate::server::Server;
use crate::sglang;
use crate::shared::{Mode, Shared, server_load};
use crate::trtllm;
use crate::vllm_info::GENERATE;

/// A connection to one server, from its discovery to its end.
pub(crate) struct UpstreamBackend {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    /// The tasks that watch the server. They end with the backend.
    tasks: Mutex<JoinSet<()>>,
}

/// Counts one forwarded request until dropped.
struct ForwardedRequest(Arc<Shared>);

impl ForwardedRequest {
    /// Counts one more request. Returns `None` for a server that reports its load itself.
    fn count(shared: &Arc<Shared>) -> Option<Self> {
        if shared.mode.gauges().is_some() {
            return None;
        }
        let running = shared.forwarded.fetch_add(1, Relaxed) + 1;
        shared.report_load(server_load(running, 0, 0.0));
        Some(Self(shared.clone()))
    }

    /// Wraps an answer so that the request counts until the answer's body is dropped.
    fn hold_for(self, answer: ForwardResponse) -> ForwardResponse {
        let body = answer.body.inspect(move |_| {
            let _counted = &self;
        });
        ForwardResponse { body: body.boxed(), ..answer }
    }
}

impl Drop for ForwardedRequest {
    fn drop(&mut self) {
        let running = self.0.forwarded.fetch_sub(1, Relaxed).saturating_sub(1);
        self.0.report_load(server_load(running, 0, 0.0));
    }
}

impl UpstreamBackend {
    /// Creates the backend of a server with these capabilities and starts to watch the server.
    pub(crate) fn new(
        name: String,
        server: Server,
        mode: Mode,
        capabilities: Capabilities,
        observer: Arc<dyn MediaObserver>,
    ) -> Self {
        let shared = Arc::new(Shared::new(name, server, mode, observer));
        let mut tasks = JoinSet::new();
        tasks.spawn(shared.clone().watch());
        Self { shared, capabilities, tasks: Mutex::new(tasks) }
    }

    async fn begin(&self, job: Arc<Job>) -> Result<Box<dyn RunningJob>, JobError> {
        let shared = &self.shared;
        if let Some(death) = shared.ended.borrow().clone() {
            return Err(JobError::NotTaken(death));
        }
        match &shared.mode {
            Mode::Vllm { .. } => Ok(Box::new(begin_vllm(shared, job).await?)),
            Mode::Sglang(rules) => Ok(Box::new(sglang::begin(shared, rules, job).await?)),
            Mode::Messages { .. } => {
                Err(JobError::NotTaken(DeathReason::new("the server accepts only whole requests")))
            }
        }
    }
}

async fn begin_vllm(shared: &Arc<Shared>, job: Arc<Job>) -> Result<RunningUpstreamJob, JobError> {
    let (body, headers) = request::build(&job)?;
    let response = shared.send_job(GENERATE, body, headers, &job).await?;
    let delivered = shared.delivered(job.media.len());
    Ok(RunningUpstreamJob::new(shared.clone(), job, response, delivered))
}

impl fmt::Debug for UpstreamBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UpstreamBackend").field("server", &self.shared.name).finish_non_exhaustive()
    }
}

impl Backend for UpstreamBackend {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn start(&self, job: Arc<Job>) -> BoxFuture<'_, Result<Box<dyn RunningJob>, JobError>> {
        self.begin(job).boxed()
    }

    fn forward(
        &self,
        mut request: ForwardRequest,
    ) -> BoxFuture<'_, Result<ForwardResponse, JobError>> {
        let shared = &self.shared;
        async move {
            let Mode::Messages { model, recent_prompts, .. } = &shared.mode else {
                return Err(JobError::NotTaken(DeathReason::new("the server accepts only tokens")));
            };
            if let Some(death) = shared.ended.borrow().clone() {
                return Err(JobError::NotTaken(death));
            }
            let counted = ForwardedRequest::count(shared);
            let in_flight = recent_prompts
                .as_ref()
                .zip(request.prompt.take())
                .map(|(recent_prompts, prompt)| recent_prompts.begin(prompt));
            let answer = plain::forward(&shared.server, model.as_deref(), request).await?;
            let answer = match in_flight {
                Some(in_flight) => in_flight.hold_for(answer),
                None => answer,
            };
            Ok(match counted {
                Some(counted) => counted.hold_for(answer),
                None => answer,
            })
        }
        .boxed()
    }

    fn load_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, Result<(), AdapterError>> {
        async { Err(AdapterError::NotEnabled) }.boxed()
    }

    fn unload_adapter<'a>(&'a self, _: &'a Adapter) -> BoxFuture<'a, ()> {
        async {}.boxed()
    }

    // Only the server knows the contents of its caches, so each item is sent again.
    fn holds(&self, _: &MmHash) -> bool {
        false
    }

    fn follow_load(&self, sink: LoadSink) {
        *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    }

    fn follow_kv(&self, sink: Box<dyn KvSink>) {
        if let Mode::Messages { recent_prompts: Some(recent_prompts), .. } = &self.shared.mode {
            let following = trtllm::follow(self.shared.clone(), recent_prompts.clone(), sink);
            self.tasks.lock().unwrap_or_else(PoisonError::into_inner).spawn(following);
        }
    }

    fn distrust(&self, why: String) {
        self.shared.distrust(why);
    }

    fn distrusted(&self) -> BoxFuture<'_, String> {
        let mut distrusted = self.shared.distrusted.subscribe();
        async move {
            match distrusted.wait_for(Option::is_some).await.ok().and_then(|why| why.clone()) {
                Some(why) => why,
                None => std::future::pending().await,
            }
        }
        .boxed()
    }

    fn ended(&self) -> BoxFuture<'_, DeathReason> {
        self.shared.when_ended()
    }

    fn silent_for(&self) -> Duration {
        Duration::from_millis(self.shared.silent_ms.load(Relaxed))
    }

    fn declare_dead(&self, death: DeathReason) {
        self.shared.end(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}
