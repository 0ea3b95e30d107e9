//! Prompts that are left for other engines, as vLLM's NIXL connector leaves them: over a side
//! channel another engine learns what was computed and says when it has it. Keys and values are
//! digests here, which is enough to notice that they are another prompt's.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use chiasm_engine::wire::Value;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use crate::computed::Computed;
use crate::work::Work;

/// How often leases are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// How long another engine may take to answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// Most bytes of a line.
const MOST_BYTES: u64 = 4096;

/// What an engine is asked to do with a prompt for others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Handed {
    /// To leave it.
    Leave,
    /// To get it from where another engine has left it.
    Get(Origin),
}

/// Where a prompt was left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    address: SocketAddr,
    request: String,
}

impl Handed {
    /// Reads what a request's `kv_transfer_params` ask for; `None` if nothing.
    ///
    /// # Errors
    /// What vLLM's engine dies of: it is to get a prompt and is not told from where.
    pub(crate) fn read(params: &Value) -> Result<Option<Self>, BadParams> {
        let is = |name: &str| params[name].as_bool() == Some(true);
        if is("do_remote_decode") {
            return Ok(Some(Self::Leave));
        }
        if !is("do_remote_prefill") {
            return Ok(None);
        }
        let needed = |name: &'static str| match &params[name] {
            Value::Nil => Err(BadParams::Missing(name)),
            value => Ok(value),
        };
        needed("remote_engine_id")?;
        needed("remote_block_ids")?;
        let text = |name: &'static str| {
            Ok::<_, BadParams>(needed(name)?.as_str().unwrap_or_default().to_owned())
        };
        let port = needed("remote_port")?.as_u64().and_then(|port| u16::try_from(port).ok());
        let host = text("remote_host")?.parse().map(|host: IpAddr| host);
        match (host, port) {
            (Ok(host), Some(port)) => Ok(Some(Self::Get(Origin {
                address: (host, port).into(),
                request: text("remote_request_id")?,
            }))),
            _ => Err(BadParams::NoAddress),
        }
    }
}

/// A request does not say from where its prompt is to be got.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BadParams {
    #[error("kv_transfer_params have no {0}")]
    Missing(&'static str),
    #[error("kv_transfer_params name no address")]
    NoAddress,
}

/// The prompts that an engine has left.
#[derive(Clone)]
pub(crate) struct LeftPrompts {
    address: SocketAddr,
    /// How long each is kept.
    lease: Duration,
    left: Arc<Mutex<Left>>,
}

#[derive(Default)]
struct Left {
    prompts: HashMap<String, LeftPrompt>,
    numbers: u64,
}

struct LeftPrompt {
    computed: Computed,
    number: u64,
    until: Instant,
}

impl LeftPrompts {
    /// Binds the side channel at this address of the machine.
    pub(crate) async fn bind(
        host: IpAddr,
        lease: Duration,
    ) -> std::io::Result<(Self, TcpListener)> {
        let listener = TcpListener::bind((host, 0)).await?;
        Ok((Self { address: listener.local_addr()?, lease, left: Arc::default() }, listener))
    }

    fn left(&self) -> MutexGuard<'_, Left> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A number for the blocks of a prompt that will be left.
    pub(crate) fn number(&self) -> u64 {
        let mut left = self.left();
        left.numbers += 1;
        left.numbers
    }

    /// Leaves a prompt, whose blocks are kept under a number. Returns what its requester is told.
    pub(crate) fn leave(
        &self,
        request: &str,
        number: u64,
        computed: Computed,
        blocks: usize,
    ) -> Value {
        let until = Instant::now() + self.lease;
        self.left().prompts.insert(request.to_owned(), LeftPrompt { computed, number, until });
        let blocks = (0..blocks).map(Value::from).collect();
        let said = [
            ("do_remote_prefill", Value::from(true)),
            ("do_remote_decode", Value::from(false)),
            ("remote_block_ids", Value::Array(vec![Value::Array(blocks)])),
            ("remote_engine_id", Value::from(self.address.to_string())),
            ("remote_request_id", Value::from(request)),
            ("remote_host", Value::from(self.address.ip().to_string())),
            ("remote_port", Value::from(self.address.port())),
            ("tp_size", Value::from(1)),
        ];
        Value::Map(said.into_iter().map(|(name, value)| (name.into(), value)).collect())
    }

    /// Answers other engines, and lets go of what nobody gets in time. Ends with its engine.
    pub(crate) async fn serve(self, listener: TcpListener, work: mpsc::UnboundedSender<Work>) {
        let mut looks = tokio::time::interval(LOOK);
        let mut others = tokio::task::JoinSet::new();
        loop {
            tokio::select! {
                accepted = listener.accept() => {
                    if let Ok((stream, _)) = accepted {
                        others.spawn(timeout(PATIENCE, self.clone().answer(stream, work.clone())));
                    }
                }
                _ = looks.tick() => {
                    while others.try_join_next().is_some() {}
                    let now = Instant::now();
                    for (_, prompt) in self.left().prompts.extract_if(|_, prompt| prompt.until <= now) {
                        let _ = work.send(Work::LetGo(prompt.number));
                    }
                }
            }
        }
    }

    /// Says what was computed of the prompt that another engine names, and lets go of it when that
    /// has it.
    async fn answer(
        self,
        mut stream: TcpStream,
        work: mpsc::UnboundedSender<Work>,
    ) -> std::io::Result<()> {
        let (read, mut write) = stream.split();
        let mut lines = BufReader::new(tokio::io::AsyncReadExt::take(read, MOST_BYTES)).lines();
        let Some(request) = lines.next_line().await? else { return Ok(()) };
        let computed = self.left().prompts.get(&request).map(|prompt| prompt.computed.clone());
        let Some(Computed(computed)) = computed else { return write.write_all(b"none\n").await };
        write.write_all(format!("{computed}\n").as_bytes()).await?;
        if lines.next_line().await?.is_some() {
            let prompt = self.left().prompts.remove(&request);
            prompt.into_iter().for_each(|prompt| drop(work.send(Work::LetGo(prompt.number))));
        }
        Ok(())
    }
}

/// Gets a prompt from where it was left; `None` if it is not there any more, or nobody answers.
pub(crate) async fn get(origin: &Origin) -> Option<Computed> {
    let getting = async {
        let mut stream = TcpStream::connect(origin.address).await.ok()?;
        let (read, mut write) = stream.split();
        write.write_all(format!("{}\n", origin.request).as_bytes()).await.ok()?;
        let mut lines = BufReader::new(tokio::io::AsyncReadExt::take(read, MOST_BYTES)).lines();
        let computed = lines.next_line().await.ok()??;
        write.write_all(b"done\n").await.ok()?;
        (computed != "none").then_some(Computed(computed))
    };
    timeout(PATIENCE, getting).await.ok().flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(30);
    const HERE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);

    fn words(change: (&str, Value)) -> Value {
        let all = [
            ("do_remote_prefill", Value::from(true)),
            ("remote_engine_id", Value::from("e")),
            ("remote_block_ids", Value::Array(Vec::new())),
            ("remote_request_id", Value::from("r")),
            ("remote_host", Value::from("127.0.0.1")),
            ("remote_port", Value::from(7)),
        ];
        let pairs = all
            .into_iter()
            .map(|(name, value)| if name == change.0 { change.clone() } else { (name, value) });
        Value::Map(pairs.map(|(name, value)| (name.into(), value)).collect())
    }

    #[test]
    fn an_engine_that_is_not_told_from_where_dies() {
        assert!(matches!(Handed::read(&words(("", Value::Nil))), Ok(Some(Handed::Get(_)))));
        for name in [
            "remote_engine_id",
            "remote_block_ids",
            "remote_request_id",
            "remote_host",
            "remote_port",
        ] {
            assert!(Handed::read(&words((name, Value::Nil))).is_err(), "{name}");
        }
        assert_eq!(Handed::read(&words(("do_remote_prefill", Value::from(false)))), Ok(None));
        assert_eq!(Handed::read(&Value::Nil), Ok(None));
    }

    #[tokio::test]
    async fn what_is_left_can_be_had_once_and_is_let_go_of_then() {
        let (left, listener) = LeftPrompts::bind(HERE, LEASE).await.unwrap();
        let (work, mut heard) = mpsc::unbounded_channel();
        let serving = tokio::spawn(left.clone().serve(listener, work));
        let computed = Computed::of(&[], &[1, 2]);
        let number = left.number();
        let said = left.leave("r", number, computed.clone(), 1);
        let Ok(Some(Handed::Get(origin))) = Handed::read(&said) else { panic!("{said}") };
        assert_eq!(get(&origin).await, Some(computed));
        assert!(matches!(heard.recv().await, Some(Work::LetGo(gone)) if gone == number));
        assert_eq!(get(&origin).await, None);
        serving.abort();
        assert_ne!(Computed::of(&[], &[1, 2]), Computed::of(&[], &[1, 3]));
    }

    #[tokio::test(start_paused = true)]
    async fn what_nobody_gets_is_let_go_of() {
        let (left, listener) = LeftPrompts::bind(HERE, LEASE).await.unwrap();
        let (work, mut heard) = mpsc::unbounded_channel();
        let serving = tokio::spawn(left.clone().serve(listener, work));
        let since = Instant::now();
        left.leave("r", 7, Computed::of(&[], &[]), 0);
        assert!(matches!(heard.recv().await, Some(Work::LetGo(7))));
        assert!(since.elapsed() >= LEASE && since.elapsed() <= LEASE + 2 * LOOK);
        serving.abort();
    }
}
