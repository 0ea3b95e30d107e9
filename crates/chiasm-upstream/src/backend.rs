//! One server as a backend.

use std::fmt;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use chiasm_backend::{
    Adapter, AdapterError, Backend, Capabilities, Death, Forward, Forwarded, Job, JobError, KvSink,
    LoadSink, MediaObserver, MemoryUsage, RunningJob,
};
use chiasm_types::MmHash;
use futures_util::future::{BoxFuture, FutureExt};
use futures_util::stream::StreamExt;
use tokio::task::JoinSet;

use crate::found::GENERATE;
use crate::plain;
use crate::request;
use crate::running::RunningUpstreamJob;
use crate::server::Server;
use crate::sglang;
use crate::shared::{Mode, Shared, server_load};
use crate::trtllm;

/// One server, from when it was found to when it is gone.
pub(crate) struct UpstreamBackend {
    shared: Arc<Shared>,
    capabilities: Capabilities,
    /// The tasks that watch the server. They end with the backend.
    tasks: Mutex<JoinSet<()>>,
}

/// Counts one request that was passed on, until it is over.
struct PassedOn(Arc<Shared>);

impl PassedOn {
    /// Counts one more request; `None` for a server that tells its load.
    fn count(shared: &Arc<Shared>) -> Option<Self> {
        if shared.mode.gauges().is_some() {
            return None;
        }
        let running = shared.passed_on.fetch_add(1, Relaxed) + 1;
        shared.tell_load(server_load(running, 0, 0.0));
        Some(Self(shared.clone()))
    }

    /// Returns the same answer. The request counts until the answer's body is dropped.
    fn hold_for(self, answer: Forwarded) -> Forwarded {
        let body = answer.body.inspect(move |_| {
            let _counted = &self;
        });
        Forwarded { body: body.boxed(), ..answer }
    }
}

impl Drop for PassedOn {
    fn drop(&mut self) {
        let running = self.0.passed_on.fetch_sub(1, Relaxed).saturating_sub(1);
        self.0.tell_load(server_load(running, 0, 0.0));
    }
}

impl UpstreamBackend {
    /// The backend of a server that was found to be like this.
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
            Mode::Vllm => Ok(Box::new(begin_vllm(shared, job).await?)),
            Mode::Sglang(manner) => Ok(Box::new(sglang::begin(shared, manner, job).await?)),
            Mode::Messages { .. } => {
                Err(JobError::NotTaken(Death::new("the server takes requests only as they come")))
            }
        }
    }
}

async fn begin_vllm(shared: &Arc<Shared>, job: Arc<Job>) -> Result<RunningUpstreamJob, JobError> {
    let (body, headers) = request::of(&job)?;
    let response = shared.ask(GENERATE, body, headers, &job).await?;
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

    fn forward(&self, mut request: Forward) -> BoxFuture<'_, Result<Forwarded, JobError>> {
        let shared = &self.shared;
        async move {
            let Mode::Messages { model, asked, .. } = &shared.mode else {
                return Err(JobError::NotTaken(Death::new("the server takes tokens alone")));
            };
            if let Some(death) = shared.ended.borrow().clone() {
                return Err(JobError::NotTaken(death));
            }
            let counted = PassedOn::count(shared);
            let in_flight = asked
                .as_ref()
                .zip(request.prompt.take())
                .map(|(asked, prompt)| asked.begin(prompt));
            let forwarded = plain::forward(&shared.server, model.as_deref(), request).await?;
            let forwarded = match in_flight {
                Some(in_flight) => in_flight.until_the_end_of(forwarded),
                None => forwarded,
            };
            Ok(match counted {
                Some(counted) => counted.hold_for(forwarded),
                None => forwarded,
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

    // What its caches hold is known to the server alone, which is given each item again.
    fn holds(&self, _: &MmHash) -> bool {
        false
    }

    fn follow_load(&self, sink: LoadSink) {
        *self.shared.load.lock().unwrap_or_else(PoisonError::into_inner) = Some(sink);
    }

    fn follow_kv(&self, sink: Box<dyn KvSink>) {
        if let Mode::Messages { asked: Some(asked), .. } = &self.shared.mode {
            let following = trtllm::follow(self.shared.clone(), asked.clone(), sink);
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

    fn ended(&self) -> BoxFuture<'_, Death> {
        self.shared.when_ended()
    }

    fn silent_for(&self) -> Duration {
        Duration::from_millis(self.shared.silent_ms.load(Relaxed))
    }

    fn declare_dead(&self, death: Death) {
        self.shared.end(death);
    }

    fn memory(&self) -> Option<MemoryUsage> {
        None
    }
}
