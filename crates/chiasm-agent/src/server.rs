//! The agent: the calls that it serves to frontends.

mod accepting;
mod announcements;
mod arriving;
mod call;
mod drain;
mod files;
mod jobs;
mod shares;
mod steps;
mod watching;

use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use chiasm_fleet::{Fleet, Worker};
use chiasm_kv::KeySecret;
use chiasm_media::ByteBudget;
use chiasm_nixl::Reader;
use chiasm_pipeline::MachineMedia;
use chiasm_types::WorkerId;
use futures_util::{Stream, stream};
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::sleep;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Server;
use tonic::{Request, Response, Status, Streaming};

use crate::peer::Peer;
use crate::proto::agent_server::{Agent, AgentServer as AgentRoutes};
use crate::proto::generate_request::Request as JobRequest;
use crate::proto::{
    AdmitEvent, AdmitRequest, CutChunk, DrainReply, DrainRequest, GenerateReply, GenerateRequest,
    HelloReply, HelloRequest, MediaChunk, Open, PutCutReply, PutMediaReply, PutTensorsReply,
    ReadTensorsReply, ReadTensorsRequest, StatusReply, StatusRequest, TensorChunk, WatchEvent,
    WatchRequest,
};
use crate::tls::AgentTls;
use crate::wire::CLOSE_TIMEOUT;
use crate::{
    KEEP_ALIVE_INTERVAL, KEEP_ALIVE_TIMEOUT, MAX_MESSAGE_BYTES, PROTOCOL_VERSIONS, TRANSFER_TIMEOUT,
};

use accepting::Bounds;
use announcements::Announcements;
use arriving::{CountingService, LeftOutJobs, MAX_INCOMING_BYTES};
use call::JobCall;
pub use drain::Drain;
use jobs::JobContext;
use shares::{Share, ShareExhausted};
pub(crate) use shares::{ShareGuard, Shares};
use watching::Watch;

/// The maximum number of calls of one connection: two for each engine, or files, which share the
/// connection's window. A frontend with more calls waits.
const MAX_STREAMS: u32 = 256;

/// The flow-control window of a stream, in bytes. Unread bytes stay in memory, for each of the
/// possible connections. A frontend that does not read its jobs' events is not read from either.
const STREAM_WINDOW_BYTES: u32 = 1 << 20;
/// The flow-control window of a connection, in bytes.
const CONNECTION_WINDOW_BYTES: u32 = 2 << 20;

/// The maximum number of files, tensors and cuts that arrive at once, from all frontends. Each call
/// takes memory before the first byte has arrived.
const MAX_FILES: usize = 4096;

/// The maximum number of calls that watch an engine, from all frontends. Each has queues of its
/// own; a frontend has one call for each engine.
const MAX_WATCHES: u64 = 4096;
/// The maximum number of snapshots of KV caches that were made and not yet read, for all frontends.
const MAX_SNAPSHOTS: u64 = 32;

/// The weight of a share of memory: an address may hold this many times the free memory. One
/// address alone gets seven eighths, which it may need.
const MEMORY_WEIGHT: u64 = 7;

/// The agent: the engines of this machine, for frontends on any machine.
pub struct AgentServer {
    fleet: Arc<Fleet>,
    media: Arc<MachineMedia>,
    /// The memory of jobs and arriving files.
    memory: Shares,
    /// The memory of messages that are not complete yet.
    arriving: Shares,
    /// The calls that watch an engine.
    watches: Shares,
    /// The snapshots for these calls.
    snapshots: Shares,
    engines: u32,
    incarnation: u64,
    /// The announcements of each engine's jobs.
    announcements: Vec<Arc<Announcements>>,
    /// One for each engine. Every frontend that has admitted the engine holds a clone.
    admissions: Vec<Arc<()>>,
    drain: Drain,
    /// The permits of arriving files.
    files: Arc<Semaphore>,
    /// The reader of tensors in frontends' memory, if there is one.
    reader: Option<Arc<Reader>>,
}

impl AgentServer {
    /// Creates an agent for the first `engines` workers of a fleet. The memory of all frontends'
    /// jobs is charged to `budget`; it may be the media loader's, for one bound on both.
    pub fn new(
        fleet: Arc<Fleet>,
        media: Arc<MachineMedia>,
        budget: ByteBudget,
        engines: u32,
    ) -> Self {
        let drain = Drain::default();
        let announcements = (0..engines).map(|_| Arc::default()).collect();
        let admissions = (0..engines).map(|_| Arc::new(())).collect();
        Self {
            fleet,
            media,
            memory: Shares::new(budget, MEMORY_WEIGHT),
            arriving: Shares::new(ByteBudget::new(MAX_INCOMING_BYTES), 1),
            watches: Shares::new(ByteBudget::new(MAX_WATCHES), 1),
            snapshots: Shares::new(ByteBudget::new(MAX_SNAPSHOTS), 1),
            engines,
            incarnation: rand::random(),
            announcements,
            admissions,
            drain,
            files: Arc::new(Semaphore::new(MAX_FILES)),
            reader: None,
        }
    }

    /// Returns the agent with a reader of tensors that frontends lend.
    #[must_use]
    pub fn with_reader(self, reader: Reader) -> Self {
        Self { reader: Some(Arc::new(reader)), ..self }
    }

    /// Returns the agent's drain state.
    pub fn drain(&self) -> Drain {
        self.drain.clone()
    }

    /// Takes a permit for an arriving file, if there is one.
    fn file_permit(&self) -> Result<SemaphorePermit<'_>, Status> {
        self.files
            .try_acquire()
            .map_err(|_| Status::resource_exhausted("the agent receives too many files"))
    }

    /// Returns the shares of memory, and of incomplete messages.
    #[cfg(test)]
    pub(crate) fn shares(&self) -> (Shares, Shares) {
        (self.memory.clone(), self.arriving.clone())
    }

    /// Returns the shares of calls that watch an engine.
    #[cfg(test)]
    pub(crate) fn watches(&self) -> Shares {
        self.watches.clone()
    }

    /// Returns the permits of arriving files.
    #[cfg(test)]
    pub(crate) fn file_permits(&self) -> Arc<Semaphore> {
        self.files.clone()
    }

    /// Returns the share of memory of a request's sender.
    fn memory<T>(&self, request: &Request<T>) -> Share {
        self.memory.for_peer(peer(request))
    }

    fn engine(&self, number: u32) -> Result<WorkerId, Status> {
        if number >= self.engines {
            return Err(no_engine(number));
        }
        Ok(WorkerId(number))
    }

    fn announcements(&self, engine: u32) -> Result<&Arc<Announcements>, Status> {
        self.announcements.get(engine as usize).ok_or_else(|| no_engine(engine))
    }

    /// Returns the engine if its current start is `life`.
    fn worker(&self, engine: u32, life: u64) -> Result<Arc<Worker>, Status> {
        let worker = self.fleet.worker(self.engine(engine)?);
        worker
            .filter(|worker| worker.life == life)
            .ok_or_else(|| Status::unavailable("this start of the engine has ended"))
    }
}

/// Serves frontends until `stop`, then accepts no new ones. The calls of connected frontends end,
/// and frontends disconnect when they have read everything. Those that take longer than some
/// seconds are disconnected.
pub async fn serve(
    agent: AgentServer,
    listener: TcpListener,
    tls: Option<Arc<AgentTls>>,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let mut server = Server::builder()
        .http2_keepalive_interval(Some(KEEP_ALIVE_INTERVAL))
        .http2_keepalive_timeout(Some(KEEP_ALIVE_TIMEOUT))
        .max_concurrent_streams(MAX_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES);
    let drain = agent.drain();
    let close_timeout = async {
        drain.wait_calls_ended().await;
        sleep(CLOSE_TIMEOUT).await;
    };
    let stop = async {
        stop.await;
        drain.end_calls();
    };
    let arriving = agent.arriving.clone();
    let routes = AgentRoutes::new(agent)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES);
    let connections = accepting::accept(listener, tls, Bounds::default());
    let routes = CountingService::new(routes, arriving, TRANSFER_TIMEOUT);
    let serving = server.add_service(routes).serve_with_incoming_shutdown(connections, stop);
    tokio::select! {
        served = serving => served,
        () = close_timeout => {
            tracing::info!("disconnecting the frontends that have not disconnected in time");
            Ok(())
        }
    }
}

type Events<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Agent for AgentServer {
    async fn hello(&self, request: Request<HelloRequest>) -> Result<Response<HelloReply>, Status> {
        let HelloRequest { oldest_protocol, newest_protocol, key_secret_fingerprint } =
            request.into_inner();
        let protocol = newest_protocol.min(*PROTOCOL_VERSIONS.end());
        if protocol < oldest_protocol.max(*PROTOCOL_VERSIONS.start()) {
            return Err(Status::failed_precondition(format!(
                "the agent supports versions {} to {} of the protocol, \
                 the frontend {oldest_protocol} to {newest_protocol}",
                PROTOCOL_VERSIONS.start(),
                PROTOCOL_VERSIONS.end()
            )));
        }
        if *key_secret_fingerprint != KeySecret::for_process().fingerprint() {
            return Err(Status::failed_precondition(
                "the agent makes block keys with another secret: \
                 frontends and agents need the same file (--block-key-secret)",
            ));
        }
        let reads_tensors = self.media.max_tensor_bytes().is_some()
            && self.reader.as_ref().is_some_and(|reader| !reader.is_disabled());
        Ok(Response::new(HelloReply {
            protocol,
            engines: self.engines,
            incarnation: self.incarnation,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            reads_tensors,
        }))
    }

    type WatchStream = Events<WatchEvent>;

    async fn watch(
        &self,
        request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let from = peer(&request);
        let WatchRequest { engine, frontend } = request.into_inner();
        let slot = self.watches.for_peer(from).acquire(1).map_err(|ShareExhausted| {
            Status::resource_exhausted("too many calls watch engines of the agent")
        })?;
        let watch = Watch {
            fleet: self.fleet.clone(),
            id: self.engine(engine)?,
            media: self.media.clone(),
            announcements: self.announcements(engine)?.clone(),
            frontend,
            drain: self.drain.clone(),
            _slot: slot,
            snapshots: self.snapshots.for_peer(from),
        };
        Ok(Response::new(Box::pin(ReceiverStream::new(watch.start()))))
    }

    type GenerateStream = Events<GenerateReply>;

    async fn generate(
        &self,
        request: Request<Streaming<GenerateRequest>>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let memory = self.memory(&request);
        let left_out_jobs = request.extensions().get::<LeftOutJobs>().cloned().unwrap_or_default();
        let mut requests = request.into_inner();
        let Some(GenerateRequest { request: Some(JobRequest::Open(open)) }) =
            requests.message().await?
        else {
            return Err(Status::invalid_argument(
                "the first message must name the engine of the jobs",
            ));
        };
        let Open { engine, life, frontend } = open;
        let context = JobContext {
            fleet: self.fleet.clone(),
            media: self.media.clone(),
            memory,
            worker: self.worker(engine, life)?,
            frontend,
            announcements: self.announcements(engine)?.clone(),
            drain: self.drain.clone(),
        };
        Ok(Response::new(Box::pin(JobCall::new(context, requests, left_out_jobs))))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let running = self.drain.set_draining(request.into_inner().draining) as u64;
        Ok(Response::new(DrainReply { running }))
    }

    type AdmitStream = Events<AdmitEvent>;

    async fn admit(
        &self,
        request: Request<AdmitRequest>,
    ) -> Result<Response<Self::AdmitStream>, Status> {
        let AdmitRequest { engine, life } = request.into_inner();
        let worker = self.worker(engine, life)?;
        let admission = self.admissions.get(engine as usize).cloned();
        let calls_ended = self.drain.wait_calls_ended();
        // The stream is dropped when the frontend disconnects, and ends with the engine or agent.
        Ok(Response::new(Box::pin(stream::once(async move {
            let _admission = admission;
            Err(Status::unavailable(tokio::select! {
                death = worker.backend.ended() => death.to_string(),
                () = calls_ended => "the agent is shutting down".to_owned(),
            }))
        }))))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let is_admitted = |admission: &&Arc<()>| Arc::strong_count(admission) > 1;
        let admitted = self.admissions.iter().filter(is_admitted).count() as u32;
        Ok(Response::new(StatusReply {
            engines: self.engines,
            admitted,
            draining: self.drain.is_draining(),
        }))
    }

    async fn put_media(
        &self,
        request: Request<Streaming<MediaChunk>>,
    ) -> Result<Response<PutMediaReply>, Status> {
        let _permit = self.file_permit()?;
        files::put_file(&self.media, self.memory(&request).empty_uncharged(), request.into_inner())
            .await?;
        Ok(Response::new(PutMediaReply {}))
    }

    async fn put_tensors(
        &self,
        request: Request<Streaming<TensorChunk>>,
    ) -> Result<Response<PutTensorsReply>, Status> {
        let _permit = self.file_permit()?;
        files::put_tensors(
            &self.media,
            self.memory(&request).empty_uncharged(),
            request.into_inner(),
        )
        .await?;
        Ok(Response::new(PutTensorsReply {}))
    }

    async fn put_cut(
        &self,
        request: Request<Streaming<CutChunk>>,
    ) -> Result<Response<PutCutReply>, Status> {
        let _permit = self.file_permit()?;
        files::put_cut(&self.media, self.memory(&request).empty_uncharged(), request.into_inner())
            .await?;
        Ok(Response::new(PutCutReply {}))
    }

    async fn read_tensors(
        &self,
        request: Request<ReadTensorsRequest>,
    ) -> Result<Response<ReadTensorsReply>, Status> {
        let reader = self.reader.as_ref();
        let reader = reader.ok_or_else(|| {
            Status::failed_precondition("the agent does not read by NIXL (--nixl-library)")
        })?;
        let _permit = self.file_permit()?;
        files::read_lent(&self.media, reader, request.into_inner()).await.map(Response::new)
    }
}

fn no_engine(number: u32) -> Status {
    Status::invalid_argument(format!("there is no engine {number}"))
}

/// Returns the peer that sent a request.
fn peer<T>(request: &Request<T>) -> Peer {
    request.extensions().get::<Peer>().copied().unwrap_or_default()
}

/// Parses a hash; `None` if it has another length.
fn parse_digest(bytes: &Bytes) -> Option<[u8; 32]> {
    bytes.as_ref().try_into().ok()
}
