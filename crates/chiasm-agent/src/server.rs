//! The agent: what frontends may ask of it.

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
    AdmitEvent, AdmitRequest, DrainReply, DrainRequest, GenerateReply, GenerateRequest, HelloReply,
    HelloRequest, MediaChunk, Open, PutMediaReply, PutTensorsReply, ReadTensorsReply,
    ReadTensorsRequest, StatusReply, StatusRequest, TensorChunk, WatchEvent, WatchRequest,
};
use crate::tls::AgentTls;
use crate::wire::LAST_WORDS;
use crate::{ANSWER_WITHIN, ASK_EVERY, MOST_MESSAGE_BYTES, PROTOCOLS, SENT_WITHIN};

use accepting::Bounds;
use announcements::Announcements;
use arriving::{Counting, MOST_ARRIVING, WithoutRoom};
use call::JobCall;
pub use drain::Drain;
use jobs::Place;
pub(crate) use shares::{Held, Shares};
use shares::{NoRoom, Share};
use watching::Watch;

/// Calls of one connection: two for each engine, or files that are under way, which have the
/// connection's bytes in common. A frontend that wants more waits.
const MOST_STREAMS: u32 = 256;

/// Bytes that may be under way on a stream, and on a connection. What nobody reads stays in memory,
/// of each connection that there may be: a frontend that does not read what it is told of its jobs
/// is not heard any more.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 2 << 20;

/// Files and tensors that may be on their way here at once, of all frontends: each call takes
/// memory before any byte of a file has come.
const MOST_FILES: usize = 4096;

/// Calls that may watch an engine, of all frontends: each has queues of its own. A frontend has one
/// for each engine.
const MOST_WATCHES: u64 = 4096;
/// Snapshots of what an engine holds that were made and not yet read, of all frontends.
const MOST_SNAPSHOTS: u64 = 32;

/// How many times as much memory the frontends at one address may hold as they leave to all others.
/// One alone has seven eighths of it, and may need that.
const MEMORY_TIMES: u64 = 7;

/// The engines of this machine, for frontends on any.
pub struct AgentServer {
    fleet: Arc<Fleet>,
    media: Arc<MachineMedia>,
    /// What jobs and files on their way hold is counted in it.
    memory: Shares,
    /// Messages that have begun to come are counted in it.
    arriving: Shares,
    /// Calls that watch an engine.
    watches: Shares,
    /// Snapshots for these.
    snapshots: Shares,
    engines: u32,
    incarnation: u64,
    /// Of each engine.
    announcements: Vec<Arc<Announcements>>,
    /// One for each engine, of which every frontend that gives it jobs holds a clone.
    admissions: Vec<Arc<()>>,
    drain: Drain,
    /// Places of files that are on their way.
    files: Arc<Semaphore>,
    /// What reads tensors out of frontends' memory, if they are read.
    reader: Option<Arc<Reader>>,
}

impl AgentServer {
    /// An agent for the first `engines` workers of a fleet. What the jobs of all frontends hold is
    /// counted in `budget`, which is that of the media's door where one bound is for both.
    pub fn new(
        fleet: Arc<Fleet>,
        media: Arc<MachineMedia>,
        budget: ByteBudget,
        engines: u32,
    ) -> Self {
        let drain = Drain::default();
        let announcements = (0..engines).map(|_| Arc::default()).collect();
        let admissions = (0..engines).map(|_| Arc::new(())).collect();
        let (incarnation, files) = (rand::random(), Arc::new(Semaphore::new(MOST_FILES)));
        let (memory, arriving) =
            (Shares::new(budget, MEMORY_TIMES), Shares::new(ByteBudget::new(MOST_ARRIVING), 1));
        let [watches, snapshots] =
            [MOST_WATCHES, MOST_SNAPSHOTS].map(|most| Shares::new(ByteBudget::new(most), 1));
        Self {
            fleet,
            media,
            memory,
            arriving,
            watches,
            snapshots,
            engines,
            incarnation,
            announcements,
            admissions,
            drain,
            files,
            reader: None,
        }
    }

    /// Reads tensors out of the memory of frontends that lend them.
    #[must_use]
    pub fn with_reader(self, reader: Reader) -> Self {
        Self { reader: Some(Arc::new(reader)), ..self }
    }

    /// What ends it.
    pub fn drain(&self) -> Drain {
        self.drain.clone()
    }

    /// A place for a file, if there is one.
    fn place_of_file(&self) -> Result<SemaphorePermit<'_>, Status> {
        self.files
            .try_acquire()
            .map_err(|_| Status::resource_exhausted("too many files are on their way there"))
    }

    /// The shares of memory, and of messages that have begun to come.
    #[cfg(test)]
    pub(crate) fn shares(&self) -> (Shares, Shares) {
        (self.memory.clone(), self.arriving.clone())
    }

    /// The places of calls that watch.
    #[cfg(test)]
    pub(crate) fn watches(&self) -> Shares {
        self.watches.clone()
    }

    /// The places of files.
    #[cfg(test)]
    pub(crate) fn places_of_files(&self) -> Arc<Semaphore> {
        self.files.clone()
    }

    /// The share of memory of whoever sends a request.
    fn memory<T>(&self, request: &Request<T>) -> Share {
        self.memory.of(peer(request))
    }

    fn engine(&self, number: u32) -> Result<WorkerId, Status> {
        let there = number < self.engines;
        there
            .then_some(WorkerId(number))
            .ok_or_else(|| Status::invalid_argument(format!("there is no engine {number}")))
    }

    fn announcements(&self, engine: u32) -> Result<&Arc<Announcements>, Status> {
        let there = self.announcements.get(engine as usize);
        there.ok_or_else(|| Status::invalid_argument(format!("there is no engine {engine}")))
    }

    /// The start of an engine that a frontend means.
    fn worker(&self, engine: u32, life: u64) -> Result<Arc<Worker>, Status> {
        let worker = self.fleet.worker(self.engine(engine)?);
        worker
            .filter(|worker| worker.life == life)
            .ok_or_else(|| Status::unavailable("that engine has ended"))
    }
}

/// Answers frontends until `stop`, then no new ones. Those that are connected are told that their
/// calls are over, and hang up when they have read all; who takes longer than some seconds is let
/// go.
///
/// # Errors
/// The server fails.
pub async fn serve(
    agent: AgentServer,
    listener: TcpListener,
    tls: Option<Arc<AgentTls>>,
    stop: impl Future<Output = ()>,
) -> Result<(), tonic::transport::Error> {
    let mut server = Server::builder()
        .http2_keepalive_interval(Some(ASK_EVERY))
        .http2_keepalive_timeout(Some(ANSWER_WITHIN))
        .max_concurrent_streams(MOST_STREAMS)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW);
    let drain = agent.drain();
    let late = async {
        drain.over().await;
        sleep(LAST_WORDS).await;
    };
    let stop = async {
        stop.await;
        drain.end_calls();
    };
    let arriving = agent.arriving.clone();
    let routes = AgentRoutes::new(agent)
        .max_decoding_message_size(MOST_MESSAGE_BYTES)
        .max_encoding_message_size(MOST_MESSAGE_BYTES);
    let connections = accepting::accept(listener, tls, Bounds::default());
    let routes = Counting::new(routes, arriving, SENT_WITHIN);
    let serving = server.add_service(routes).serve_with_incoming_shutdown(connections, stop);
    tokio::select! {
        served = serving => served,
        () = late => {
            tracing::info!("frontends that have not hung up are let go");
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
        let protocol = newest_protocol.min(*PROTOCOLS.end());
        if protocol < oldest_protocol.max(*PROTOCOLS.start()) {
            return Err(Status::failed_precondition(format!(
                "it speaks versions {} to {} of the protocol, the frontend {oldest_protocol} to {newest_protocol}",
                PROTOCOLS.start(),
                PROTOCOLS.end()
            )));
        }
        if *key_secret_fingerprint != KeySecret::of_process().fingerprint() {
            let others = "it makes block keys with another secret: all need the same file (--block-key-secret)";
            return Err(Status::failed_precondition(others));
        }
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let (engines, incarnation) = (self.engines, self.incarnation);
        let reads_tensors = self.media.max_tensor_bytes().is_some()
            && self.reader.as_ref().is_some_and(|reader| !reader.is_off());
        Ok(Response::new(HelloReply { protocol, engines, incarnation, version, reads_tensors }))
    }

    type WatchStream = Events<WatchEvent>;

    async fn watch(
        &self,
        request: Request<WatchRequest>,
    ) -> Result<Response<Self::WatchStream>, Status> {
        let from = peer(&request);
        let WatchRequest { engine, frontend } = request.into_inner();
        let place = self.watches.of(from).take(1);
        let place = place
            .map_err(|NoRoom| Status::resource_exhausted("too many calls watch engines there"))?;
        let (id, announcements) = (self.engine(engine)?, self.announcements(engine)?.clone());
        let watch = Watch {
            fleet: self.fleet.clone(),
            id,
            media: self.media.clone(),
            announcements,
            frontend,
            drain: self.drain.clone(),
            _place: place,
            snapshots: self.snapshots.of(from),
        };
        Ok(Response::new(Box::pin(ReceiverStream::new(watch.begin()))))
    }

    type GenerateStream = Events<GenerateReply>;

    async fn generate(
        &self,
        request: Request<Streaming<GenerateRequest>>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let memory = self.memory(&request);
        let without_room = request.extensions().get::<WithoutRoom>().cloned().unwrap_or_default();
        let mut requests = request.into_inner();
        let Some(GenerateRequest { request: Some(JobRequest::Open(open)) }) =
            requests.message().await?
        else {
            return Err(Status::invalid_argument(
                "the first message says which engine the jobs are for",
            ));
        };
        let Open { engine, life, frontend } = open;
        let place = Place {
            fleet: self.fleet.clone(),
            media: self.media.clone(),
            memory,
            worker: self.worker(engine, life)?,
            frontend,
            announcements: self.announcements(engine)?.clone(),
            drain: self.drain.clone(),
        };
        Ok(Response::new(Box::pin(JobCall::new(place, requests, without_room))))
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        let running = self.drain.set(request.into_inner().draining) as u64;
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
        let over = self.drain.over();
        // Dropped when the frontend goes away, and over when the engine or the agent is.
        Ok(Response::new(Box::pin(stream::once(async move {
            let _admission = admission;
            Err(Status::unavailable(tokio::select! {
                death = worker.backend.ended() => death.to_string(),
                () = over => "the agent goes down".to_owned(),
            }))
        }))))
    }

    async fn status(&self, _: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let is_admitted = |admission: &&Arc<()>| Arc::strong_count(admission) > 1;
        let admitted = self.admissions.iter().filter(is_admitted).count() as u32;
        Ok(Response::new(StatusReply {
            engines: self.engines,
            admitted,
            draining: self.drain.is_begun(),
        }))
    }

    async fn put_media(
        &self,
        request: Request<Streaming<MediaChunk>>,
    ) -> Result<Response<PutMediaReply>, Status> {
        let _place = self.place_of_file()?;
        files::put(&self.media, self.memory(&request).nothing_beside(), request.into_inner())
            .await?;
        Ok(Response::new(PutMediaReply {}))
    }

    async fn put_tensors(
        &self,
        request: Request<Streaming<TensorChunk>>,
    ) -> Result<Response<PutTensorsReply>, Status> {
        let _place = self.place_of_file()?;
        files::put_tensors(
            &self.media,
            self.memory(&request).nothing_beside(),
            request.into_inner(),
        )
        .await?;
        Ok(Response::new(PutTensorsReply {}))
    }

    async fn read_tensors(
        &self,
        request: Request<ReadTensorsRequest>,
    ) -> Result<Response<ReadTensorsReply>, Status> {
        let reader = self.reader.as_ref();
        let reader = reader.ok_or_else(|| {
            Status::failed_precondition("nothing is read by NIXL (--nixl-library)")
        })?;
        let _place = self.place_of_file()?;
        files::read_lent(&self.media, reader, request.into_inner()).await.map(Response::new)
    }
}

/// Where a request comes from.
fn peer<T>(request: &Request<T>) -> Peer {
    request.extensions().get::<Peer>().copied().unwrap_or_default()
}

/// What a hash of a message is.
fn digest(bytes: &Bytes) -> Option<[u8; 32]> {
    bytes.as_ref().try_into().ok()
}
