//! Prompts that are kept for other engines, like those of vLLM's NIXL connector. Another engine
//! fetches a prompt over a side channel and confirms the receipt. In place of keys and values it
//! gets a digest of the prompt, which is enough to detect a wrong prompt.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_engine::wire::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, timeout};

use crate::prompt_digest::PromptDigest;
use crate::work::Work;

/// The interval between checks for expired leases.
const LEASE_CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// The deadline for an exchange with another engine.
const PEER_TIMEOUT: Duration = Duration::from_secs(5);
/// The pause after a failed accept, which is usually caused by a lack of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// The maximum number of bytes that are read from another engine.
const MAX_READ_BYTES: u64 = 4096;

/// The transfer of a prompt that a request asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum KvTransfer {
    /// Keep the prompt for another engine.
    Keep,
    /// Fetch the prompt from the engine that keeps it.
    Fetch(Origin),
}

/// The engine that keeps a prompt, and the prompt's request there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    address: SocketAddr,
    request: String,
}

impl KvTransfer {
    /// Parses a request's `kv_transfer_params`; `None` if they ask for no transfer.
    ///
    /// # Errors
    /// Returns [`BadParams`] if the origin of a prompt is missing. vLLM's engine dies of that.
    pub(crate) fn parse(params: &Value) -> Result<Option<Self>, BadParams> {
        let is_set = |name: &str| params[name].as_bool() == Some(true);
        if is_set("do_remote_decode") {
            return Ok(Some(Self::Keep));
        }
        if !is_set("do_remote_prefill") {
            return Ok(None);
        }
        let required = |name: &'static str| match &params[name] {
            Value::Nil => Err(BadParams::Missing(name)),
            value => Ok(value),
        };
        required("remote_engine_id")?;
        required("remote_block_ids")?;
        let text = |name: &'static str| {
            Ok::<_, BadParams>(required(name)?.as_str().unwrap_or_default().to_owned())
        };
        let port = required("remote_port")?.as_u64().and_then(|port| u16::try_from(port).ok());
        let host = text("remote_host")?.parse().map(|host: IpAddr| host);
        match (host, port) {
            (Ok(host), Some(port)) => Ok(Some(Self::Fetch(Origin {
                address: (host, port).into(),
                request: text("remote_request_id")?,
            }))),
            _ => Err(BadParams::NoAddress),
        }
    }
}

/// An error of `kv_transfer_params` that ask for a prompt from another engine.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadParams {
    #[error("kv_transfer_params have no {0}")]
    Missing(&'static str),
    #[error("kv_transfer_params have no valid address")]
    NoAddress,
}

/// The prompts that an engine keeps for others.
#[derive(Clone)]
pub(crate) struct PromptStore {
    address: SocketAddr,
    /// The time for which each prompt is kept.
    lease: Duration,
    state: Arc<Mutex<StoreState>>,
}

#[derive(Default)]
struct StoreState {
    prompts: HashMap<String, KeptPrompt>,
    last_id: u64,
}

struct KeptPrompt {
    digest: PromptDigest,
    retention_id: u64,
    expires_at: Instant,
}

impl PromptStore {
    /// Binds the side channel at this address of the machine.
    pub(crate) async fn bind(
        host: IpAddr,
        lease: Duration,
    ) -> std::io::Result<(Self, TcpListener)> {
        let listener = TcpListener::bind((host, 0)).await?;
        Ok((Self { address: listener.local_addr()?, lease, state: Arc::default() }, listener))
    }

    fn lock(&self) -> MutexGuard<'_, StoreState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns an unused retention id, for the blocks of a prompt.
    pub(crate) fn next_id(&self) -> u64 {
        let mut state = self.lock();
        state.last_id += 1;
        state.last_id
    }

    /// Keeps a prompt, whose blocks are retained under `retention_id`. Returns the
    /// `kv_transfer_params` for the request that fetches the prompt.
    pub(crate) fn keep(
        &self,
        request: &str,
        retention_id: u64,
        digest: PromptDigest,
        blocks: usize,
    ) -> Value {
        let expires_at = Instant::now() + self.lease;
        let prompt = KeptPrompt { digest, retention_id, expires_at };
        self.lock().prompts.insert(request.to_owned(), prompt);
        let blocks = (0..blocks).map(Value::from).collect();
        let params = [
            ("do_remote_prefill", Value::from(true)),
            ("do_remote_decode", Value::from(false)),
            ("remote_block_ids", Value::Array(vec![Value::Array(blocks)])),
            ("remote_engine_id", Value::from(self.address.to_string())),
            ("remote_request_id", Value::from(request)),
            ("remote_host", Value::from(self.address.ip().to_string())),
            ("remote_port", Value::from(self.address.port())),
            ("tp_size", Value::from(1)),
        ];
        Value::Map(params.into_iter().map(|(name, value)| (name.into(), value)).collect())
    }

    /// Answers other engines, and releases prompts whose lease has expired. Runs until its engine
    /// ends.
    pub(crate) async fn serve(self, listener: TcpListener, work: mpsc::UnboundedSender<Work>) {
        let mut checks = tokio::time::interval(LEASE_CHECK_INTERVAL);
        let mut peers = tokio::task::JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    match accepted {
                        Ok((stream, _)) => {
                            let answer = self.clone().answer(stream, work.clone());
                            peers.spawn(timeout(PEER_TIMEOUT, answer));
                        }
                        Err(_) => sleep(ACCEPT_PAUSE).await,
                    }
                }
                _ = checks.tick() => {
                    while peers.try_join_next().is_some() {}
                    let now = Instant::now();
                    let mut state = self.lock();
                    let expired = state.prompts.extract_if(|_, prompt| prompt.expires_at <= now);
                    for (_, prompt) in expired {
                        let _ = work.send(Work::ReleaseRetained(prompt.retention_id));
                    }
                }
            }
        }
    }

    /// Sends the digest of the prompt that another engine asks for, and releases the prompt once
    /// that engine has confirmed.
    async fn answer(
        self,
        mut stream: TcpStream,
        work: mpsc::UnboundedSender<Work>,
    ) -> std::io::Result<()> {
        let (read, mut write) = stream.split();
        let mut lines = BufReader::new(tokio::io::AsyncReadExt::take(read, MAX_READ_BYTES)).lines();
        let Some(request) = lines.next_line().await? else { return Ok(()) };
        let digest = self.lock().prompts.get(&request).map(|prompt| prompt.digest.clone());
        let Some(PromptDigest(digest)) = digest else { return write.write_all(b"none\n").await };
        write.write_all(format!("{digest}\n").as_bytes()).await?;
        if lines.next_line().await?.is_some() {
            let prompt = self.lock().prompts.remove(&request);
            if let Some(prompt) = prompt {
                let _ = work.send(Work::ReleaseRetained(prompt.retention_id));
            }
        }
        Ok(())
    }
}

/// Fetches a prompt from the engine that keeps it; `None` if the prompt is gone or the engine does
/// not answer.
pub(crate) async fn fetch(origin: &Origin) -> Option<PromptDigest> {
    let fetching = async {
        let mut stream = TcpStream::connect(origin.address).await.ok()?;
        let (read, mut write) = stream.split();
        write.write_all(format!("{}\n", origin.request).as_bytes()).await.ok()?;
        let mut lines = BufReader::new(tokio::io::AsyncReadExt::take(read, MAX_READ_BYTES)).lines();
        let digest = lines.next_line().await.ok()??;
        write.write_all(b"done\n").await.ok()?;
        (digest != "none").then_some(PromptDigest(digest))
    };
    timeout(PEER_TIMEOUT, fetching).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn params_with(change: (&str, Value)) -> Value {
        let params = [
            ("do_remote_prefill", Value::from(true)),
            ("remote_engine_id", Value::from("e")),
            ("remote_block_ids", Value::Array(Vec::new())),
            ("remote_request_id", Value::from("r")),
            ("remote_host", Value::from("127.0.0.1")),
            ("remote_port", Value::from(7)),
        ];
        let pairs = params
            .into_iter()
            .map(|(name, value)| if name == change.0 { change.clone() } else { (name, value) });
        Value::Map(pairs.map(|(name, value)| (name.into(), value)).collect())
    }

    #[test]
    fn fetch_without_an_origin_is_refused() {
        let parse = |change: (&str, Value)| KvTransfer::parse(&params_with(change));
        assert!(matches!(parse(("", Value::Nil)), Ok(Some(KvTransfer::Fetch(_)))));
        for name in [
            "remote_engine_id",
            "remote_block_ids",
            "remote_request_id",
            "remote_host",
            "remote_port",
        ] {
            assert!(parse((name, Value::Nil)).is_err(), "{name}");
        }
        assert_eq!(parse(("do_remote_prefill", Value::from(false))), Ok(None));
        assert_eq!(KvTransfer::parse(&Value::Nil), Ok(None));
    }

    #[tokio::test]
    async fn kept_prompt_is_released_after_one_fetch() {
        let (store, listener) = PromptStore::bind(HERE, LEASE).await.unwrap();
        let (work, mut received) = mpsc::unbounded_channel();
        let serving = tokio::spawn(store.clone().serve(listener, work));
        let digest = PromptDigest::new(&[], &[1, 2]);
        let id = store.next_id();
        let params = store.keep("r", id, digest.clone(), 1);
        let Ok(Some(KvTransfer::Fetch(origin))) = KvTransfer::parse(&params) else {
            panic!("{params}")
        };
        assert_eq!(fetch(&origin).await, Some(digest));
        let released = received.recv().await;
        assert!(matches!(released, Some(Work::ReleaseRetained(released)) if released == id));
        assert_eq!(fetch(&origin).await, None);
        serving.abort();
        assert_ne!(PromptDigest::new(&[], &[1, 2]), PromptDigest::new(&[], &[1, 3]));
    }

    #[tokio::test(start_paused = true)]
    async fn expired_prompt_is_released() {
        let (store, listener) = PromptStore::bind(HERE, LEASE).await.unwrap();
        let (work, mut received) = mpsc::unbounded_channel();
        let serving = tokio::spawn(store.clone().serve(listener, work));
        let since = Instant::now();
        store.keep("r", 7, PromptDigest::new(&[], &[]), 0);
        assert!(matches!(received.recv().await, Some(Work::ReleaseRetained(7))));
        let elapsed = since.elapsed();
        assert!(elapsed >= LEASE && elapsed <= LEASE + 2 * LEASE_CHECK_INTERVAL);
        serving.abort();
    }
}
