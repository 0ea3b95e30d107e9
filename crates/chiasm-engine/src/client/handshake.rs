//! The handshake on bound sockets: with a new engine, or with one that reconnects to a restarted
//! frontend.

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use chiasm_zmtp::{Event, Pull, Router, SendError};
use futures_util::FutureExt;
use tokio::sync::{Mutex, OwnedMappedMutexGuard, OwnedMutexGuard};

use super::adoption::{AdoptionStep, FormerEngine};
use super::connection::Connection;
use super::delivery::Delivery;
use super::probe::probe_when_silent;
use super::tasks;
use super::{ClientHandle, ClientOptions, EngineClient};
use crate::endpoints::EngineEndpoints;
use crate::error::EngineError;
use crate::group::{Generation, ReadyRank};
use crate::wire::handshake::{self, EngineReady, Hello, InitMessage};
use crate::wire::request;
use crate::wire::version::{self, Support};

/// The time to wait for a port in use to become free: the tasks of the engine's previous start may
/// still be closing their sockets.
const REBIND_TIMEOUT: Duration = Duration::from_secs(2);

/// The timeout for sending a message of the handshake. Every engine reads such messages at once;
/// only a peer that is not an engine lets them wait.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);

/// A handshake socket that stays open from one engine to the next, for engines that all use one
/// address.
///
/// ZeroMQ does not resend a HELLO whose connection closes. If each engine had a handshake socket of
/// its own, an engine that starts just before the socket of its predecessor closes would wait for
/// INIT until its timeout: five minutes in vLLM.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedHandshake(Arc<Mutex<Option<Router>>>);

/// The handshake socket of a pending engine.
enum HandshakeSocket {
    Own(Router),
    Shared(OwnedMappedMutexGuard<Option<Router>, Router>),
}

impl HandshakeSocket {
    async fn bind(address: String, shared: Option<&SharedHandshake>) -> Result<Self, EngineError> {
        let Some(SharedHandshake(shared)) = shared else {
            return Ok(Self::Own(bind_with_retry(Router::bind, address).await?));
        };
        let mut socket = shared.clone().lock_owned().await;
        let open = match socket.take() {
            Some(open) => open,
            None => bind_with_retry(Router::bind, address).await?,
        };
        Ok(Self::Shared(OwnedMutexGuard::map(socket, |socket| socket.insert(open))))
    }

    fn router(&self) -> &Router {
        match self {
            Self::Own(socket) => socket,
            Self::Shared(socket) => socket,
        }
    }

    fn router_mut(&mut self) -> &mut Router {
        match self {
            Self::Own(socket) => socket,
            Self::Shared(socket) => socket,
        }
    }

    /// Closes an engine's own socket; a shared one stays open for the next engine.
    async fn release(self) {
        if let Self::Own(socket) = self {
            socket.close().await;
        }
    }
}

/// Bound sockets that wait for their engine. Dropping it closes them.
pub struct PendingEngine {
    handshake: HandshakeSocket,
    input: Router,
    output: Pull,
    addresses: EngineEndpoints,
    options: ClientOptions,
    /// The engine of an earlier frontend, while it may still reconnect.
    former: Option<FormerEngine>,
    /// The generation of the engine's group, if it is in one.
    generation: Option<Arc<Generation>>,
    /// `true` if an engine has sent HELLO.
    got_hello: bool,
    /// The address from which the engine last connected to the input socket; `None` for a Unix
    /// socket.
    peer: Option<IpAddr>,
}

/// The result of a handshake.
struct HandshakeOutcome {
    /// The encoded ready report.
    report: Bytes,
    ready: EngineReady,
    /// The hash of the parallel configuration of an engine in a group.
    config_hash: Option<String>,
    /// `true` if the engine was taken over from an earlier frontend and may still have requests of
    /// it.
    adopted: bool,
}

impl PendingEngine {
    pub(super) async fn bind(
        endpoints: EngineEndpoints,
        options: ClientOptions,
        shared_handshake: Option<&SharedHandshake>,
    ) -> Result<Self, EngineError> {
        let handshake = HandshakeSocket::bind(endpoints.handshake, shared_handshake).await?;
        let input = bind_with_retry(Router::bind, endpoints.input).await?;
        let output = bind_with_retry(Pull::bind, endpoints.output).await?;
        let addresses = EngineEndpoints {
            handshake: handshake.router().address().to_owned(),
            input: input.address().to_owned(),
            output: output.address().to_owned(),
        };
        Ok(Self {
            handshake,
            input,
            output,
            addresses,
            options,
            former: None,
            generation: None,
            got_hello: false,
            peer: None,
        })
    }

    /// Also accepts the engine of an earlier frontend that listened on the same addresses. `report`
    /// is the value of [`EngineClient::report`] in that frontend. The first engine wins: this one
    /// when it reconnects, or another one when it sends HELLO.
    ///
    /// An engine that reconnects is used once it has emptied its receiver cache. Its requests of
    /// the earlier frontend are aborted. If it is not used, `forget` is awaited before another
    /// engine receives these addresses: a later frontend must not take this report for that
    /// engine's.
    ///
    /// # Errors
    /// [`EngineError::Handshake`]: the report can't be decoded.
    pub fn or_adopt(
        mut self,
        report: Bytes,
        forget: impl Future<Output = ()> + Send + 'static,
    ) -> Result<Self, EngineError> {
        self.former = Some(FormerEngine::new(report, forget.boxed())?);
        Ok(self)
    }

    /// Makes the engine a member of a generation of its group.
    pub(crate) fn in_generation(self, generation: Option<Arc<Generation>>) -> Self {
        Self { generation, ..self }
    }

    /// Returns the bound addresses, with the ports that the system picked.
    pub fn endpoints(&self) -> &EngineEndpoints {
        &self.addresses
    }

    /// Waits until the engine is ready. Loading a large model takes minutes.
    ///
    /// Closes the handshake socket then, unless the worker's engines share it. The HELLO of the
    /// worker's next engine waits for the next client.
    ///
    /// # Errors
    /// [`EngineError::ReadyTimeout`] if the engine is not ready in time, [`EngineError::Version`]
    /// if its version is not supported, [`EngineError::Handshake`] if its report can't be decoded.
    pub async fn ready(mut self) -> Result<EngineClient, EngineError> {
        let HandshakeOutcome { report, ready, config_hash, adopted } =
            match self.options.ready_timeout {
                None => self.shake_hands().await?,
                Some(after) => match tokio::time::timeout(after, self.shake_hands()).await {
                    Ok(outcome) => outcome?,
                    Err(_) => {
                        let handshake = self.addresses.handshake.clone();
                        return Err(EngineError::ReadyTimeout { handshake, after });
                    }
                },
            };
        check_version(&ready.vllm_version, self.options.strict_version)?;
        if let Some(generation) = &self.generation {
            let version = ready.vllm_version.clone();
            generation.all_ready(ReadyRank { version, config_hash }).await?;
        }
        self.handshake.release().await;

        let identity = Bytes::copy_from_slice(&handshake::identity(self.options.rank));
        let membership = self.generation.map(|generation| (self.options.rank, generation));
        let (connection, messages) = Connection::new(adopted, membership);
        tokio::spawn(tasks::send_requests(self.input, identity, messages, connection.clone()));
        tokio::spawn(tasks::receive_outputs(self.output, connection.clone()));
        if let Some(interval) = self.options.probe_after {
            tokio::spawn(probe_when_silent(connection.clone(), interval));
        }
        let delivery = Delivery::new(self.options.receiver_cache_bytes);
        let handle = ClientHandle {
            connection,
            report,
            ready,
            options: self.options,
            addresses: self.addresses,
            peer: self.peer,
            delivery,
        };
        Ok(EngineClient { handle: Arc::new(handle) })
    }

    /// Answers HELLO by INIT, then waits for READY and for the report on the input socket, in
    /// either order.
    ///
    /// An engine whose frontend ended while it loaded its model sends READY and the report to the
    /// next frontend, without a HELLO.
    async fn shake_hands(&mut self) -> Result<HandshakeOutcome, EngineError> {
        let init = match &self.generation {
            Some(generation) => generation.init(&self.addresses),
            None => InitMessage::new(&self.addresses.input, &self.addresses.output),
        };
        let init = init.encode();
        let mut report = None;
        let mut got_ready = None;
        loop {
            let was_probed = self.former.as_ref().is_some_and(FormerEngine::was_probed);
            tokio::select! {
                event = self.handshake.router_mut().next() => {
                    let Some((identity, payload)) = self.accept(event) else { continue };
                    match Hello::decode(&payload) {
                        Ok(hello) if hello.is_hello() => {
                            self.on_hello(&identity, init.clone()).await;
                            // A second HELLO comes from an engine that was restarted meanwhile.
                            report = None;
                            got_ready = None;
                        }
                        Ok(hello) if hello.is_ready() => got_ready = Some(hello.parallel_config_hash),
                        Ok(Hello { status, .. }) => {
                            tracing::warn!(%status, "unknown handshake status ignored");
                        }
                        Err(error) => {
                            tracing::warn!(%error, "unreadable handshake message ignored");
                        }
                    }
                }
                event = self.input.next() => match event {
                    Event::Connected { identity, from } => self.on_connected(&identity, from).await,
                    event => {
                        let Some((_, payload)) = self.accept(event) else { continue };
                        report = Some((EngineReady::decode(&payload)?, payload));
                    }
                },
                event = self.output.next(), if was_probed => {
                    let Event::Message { frames, .. } = event else { continue };
                    if let Some((report, ready)) = self.on_former_message(&frames).await {
                        return Ok(HandshakeOutcome {
                            report,
                            ready,
                            config_hash: None,
                            adopted: true,
                        });
                    }
                }
            }
            if let Some(config_hash) = &got_ready
                && let Some((ready, report)) = report.take()
            {
                let config_hash = config_hash.clone();
                return Ok(HandshakeOutcome { report, ready, config_hash, adopted: false });
            }
        }
    }

    /// Gives up the former engine and answers a HELLO.
    async fn on_hello(&mut self, identity: &[u8], init: Bytes) {
        tracing::debug!(handshake = %self.addresses.handshake, "engine has sent HELLO");
        self.got_hello = true;
        self.give_up_former().await;
        if let Err(error) = send(self.handshake.router_mut(), identity, vec![init]).await {
            tracing::warn!(%error, "engine left during the handshake");
        }
    }

    /// Stores the address of an engine that connected to the input socket, and probes a former
    /// engine.
    async fn on_connected(&mut self, identity: &[u8], from: Option<IpAddr>) {
        if handshake::rank(identity) != Some(self.options.rank) {
            return;
        }
        self.peer = from;
        let input = &self.addresses.input;
        match &mut self.former {
            Some(former) => {
                tracing::debug!(input, "probing an engine that has reconnected");
                let probe = former.probe();
                self.send(probe).await;
            }
            None if !self.got_hello => {
                tracing::warn!(
                    input,
                    "an engine without a record has reconnected; \
                     unless it is still loading its model, start it again"
                );
            }
            None => {}
        }
    }

    /// Handles a message of the former engine. Returns its report once it can be used.
    async fn on_former_message(&mut self, frames: &[Bytes]) -> Option<(Bytes, EngineReady)> {
        match self.former.as_mut()?.on_message(frames) {
            AdoptionStep::Wait => None,
            AdoptionStep::Abort(ids) => {
                self.send(request::encode_abort(&ids)).await;
                None
            }
            AdoptionStep::Adopt => self.former.take().map(FormerEngine::into_report),
            AdoptionStep::GiveUp(why) => {
                tracing::warn!(
                    why,
                    "can't use an engine that has reconnected, waiting for another one"
                );
                self.give_up_former().await;
                None
            }
        }
    }

    async fn give_up_former(&mut self) {
        if let Some(former) = self.former.take() {
            former.give_up().await;
        }
    }

    /// Sends a message to the former engine. If it has disconnected, it is probed again when it
    /// reconnects.
    async fn send(&mut self, frames: Vec<Bytes>) {
        let identity = handshake::identity(self.options.rank);
        if let Err(error) = send(&mut self.input, &identity, frames).await {
            tracing::debug!(%error, "an engine that had reconnected has disconnected again");
        }
    }

    /// Returns the identity and the payload of an event; `None`, logged, unless it is a message of
    /// the expected engine.
    fn accept(&self, event: Event) -> Option<(Bytes, Bytes)> {
        let Event::Message { identity, frames } = event else { return None };
        let [payload] = &frames[..] else {
            tracing::warn!(
                frames = frames.len(),
                "handshake message with an unexpected number of frames ignored"
            );
            return None;
        };
        if handshake::rank(&identity) != Some(self.options.rank) {
            tracing::warn!(
                ?identity,
                rank = self.options.rank,
                "message of another engine ignored"
            );
            return None;
        }
        Some((identity, payload.clone()))
    }
}

/// Sends a message that every engine reads at once.
async fn send(socket: &mut Router, identity: &[u8], frames: Vec<Bytes>) -> Result<(), SendError> {
    tokio::time::timeout(SEND_TIMEOUT, socket.send(identity, frames))
        .await
        .unwrap_or(Err(SendError::Lost))
}

/// Binds a socket, and retries for [`REBIND_TIMEOUT`] while the address is in use.
async fn bind_with_retry<S>(
    bind: impl AsyncFn(&str) -> io::Result<S>,
    address: String,
) -> Result<S, EngineError> {
    let deadline = tokio::time::Instant::now() + REBIND_TIMEOUT;
    loop {
        match bind(&address).await {
            Ok(socket) => return Ok(socket),
            Err(error)
                if error.kind() == io::ErrorKind::AddrInUse
                    && tokio::time::Instant::now() < deadline =>
            {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Err(source) => return Err(EngineError::Bind { address, source }),
        }
    }
}

fn check_version(found: &str, strict: bool) -> Result<(), EngineError> {
    match version::support(found) {
        Support::Supported => Ok(()),
        Support::Newer | Support::Unknown if !strict => {
            tracing::warn!(
                found,
                tested = version::window(),
                "the engine runs a version of vLLM that Chiasm was not tested with; \
                 answers may be wrong"
            );
            Ok(())
        }
        _ => Err(EngineError::Version { found: found.to_owned(), tested: version::window() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn newer_version_is_refused_only_if_strict() {
        assert!(check_version("0.32.0", true).is_ok());
        assert!(check_version("0.34.1", false).is_ok());
        assert!(check_version("main", false).is_ok());
        for (found, strict) in [("0.30.9", false), ("0.34.1", true), ("main", true)] {
            assert!(
                matches!(check_version(found, strict), Err(EngineError::Version { .. })),
                "{found}"
            );
        }
    }
}
