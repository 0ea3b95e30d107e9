//! A frontend that does nothing: whenever its engine says something, each client gets the same
//! bytes. What a streamed token costs there, and how long it takes, is the limit for those that do
//! something.

use std::error::Error;
use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use peers::programs::free_address;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;
use tokio::time::{MissedTickBehavior, interval};
use zeromq::{PullSocket, PushSocket, Socket, SocketRecv, SocketSend};

use crate::client::nanoseconds;
use crate::program::Program;
use crate::side::{Counts, Inputs, Side, command};
use crate::workload::{LONG_TOKENS, MODEL, Rate};

/// Side of it.
const NAME: &str = "null relay";
/// What an engine's message has for some dozens of streams.
const MESSAGE_BYTES: usize = 4096;

/// Two processes of this program: the relay, and what stands for its engine.
pub(crate) fn start(inputs: &Inputs, rate: Rate) -> Result<Side, Box<dyn Error>> {
    let (address, engine) = (free_address()?, format!("tcp://{}", free_address()?));
    let steps = inputs.scratch.join("relay.steps");
    let this = std::env::current_exe()?;
    let mut frontend = command(&this);
    frontend.args(["relay", "--listen", &address.to_string(), "--engine", &engine]);
    let mut beat = command(&this);
    beat.args(["beat", "--relay", &engine, "--rate", &rate.steps().to_string(), "--step-log"]).arg(&steps);
    let frontend = Program::start("relay", &mut frontend, &inputs.scratch)?;
    Ok(Side {
        counts: Counts::Nothing,
        engines: vec![Program::start("beat", &mut beat, &inputs.scratch)?],
        tells_text_alone: true,
        steps: Some(steps),
        ..Side::new(NAME, address, String::new(), frontend)
    })
}

/// Stands for an engine: says something so many times per second, and writes down when, as a
/// simulated engine does.
pub(crate) async fn beat(relay: &str, rate: f64, step_log: &str) -> Result<(), Box<dyn Error>> {
    let mut log = File::create(step_log)?;
    let mut socket = PushSocket::new();
    socket.connect(relay).await?;
    let mut beats = interval(Duration::from_secs_f64(1.0 / rate));
    beats.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        beats.tick().await;
        log.write_all(&nanoseconds().to_le_bytes())?;
        socket.send(vec![0; MESSAGE_BYTES].into()).await?;
    }
}

/// A client that waits for the tokens of a stream.
struct Stream {
    socket: BufReader<TcpStream>,
    left: u64,
    /// Gives the connection back.
    ended: oneshot::Sender<BufReader<TcpStream>>,
}

type Streams = Arc<Mutex<Vec<Stream>>>;

/// Serves until it is killed.
pub(crate) async fn relay(listen: SocketAddr, engine: &str) -> Result<(), Box<dyn Error>> {
    let mut messages = PullSocket::new();
    messages.bind(engine).await?;
    let listener = TcpListener::bind(listen).await?;
    let streams = Streams::default();
    let token = chunk(&event(r#"{"content":" token"}"#));
    let end = [
        chunk("data: {\"usage\":{\"prompt_tokens\":1,\"completion_tokens\":256}}\n\ndata: [DONE]\n\n"),
        "0\r\n\r\n".to_owned(),
    ];
    let end = end.concat();
    loop {
        tokio::select! {
            client = listener.accept() => {
                let (socket, _) = client?;
                socket.set_nodelay(true)?;
                let streams = streams.clone();
                // A connection that breaks is the client's loss.
                tokio::spawn(async move { drop(serve(BufReader::new(socket), &streams).await) });
            }
            message = messages.recv() => {
                message?;
                let mut streams = streams.lock().unwrap_or_else(PoisonError::into_inner);
                let all = std::mem::take(&mut *streams);
                for mut stream in all {
                    // Buffers of the system have room for whole answers.
                    if stream.socket.get_ref().try_write(token.as_bytes()).is_err() {
                        continue;
                    }
                    stream.left -= 1;
                    match stream.left {
                        0 if stream.socket.get_ref().try_write(end.as_bytes()).is_ok() => {
                            drop(stream.ended.send(stream.socket));
                        }
                        0 => {}
                        _ => streams.push(stream),
                    }
                }
            }
        }
    }
}

/// Answers the requests of one connection.
async fn serve(mut socket: BufReader<TcpStream>, streams: &Streams) -> Result<(), Box<dyn Error + Send + Sync>> {
    loop {
        let (mut head, mut length) = (String::new(), 0);
        while !head.ends_with("\r\n\r\n") {
            let begin = head.len();
            if socket.read_line(&mut head).await? == 0 {
                return Ok(());
            }
            let line = head[begin..].to_ascii_lowercase();
            if let Some(value) = line.strip_prefix("content-length:") {
                length = value.trim().parse()?;
            }
        }
        let mut body = vec![0; length];
        socket.read_exact(&mut body).await?;
        if !String::from_utf8_lossy(&body).contains(r#""stream":true"#) {
            let body = format!(r#"{{"model":"{MODEL}","usage":{{"prompt_tokens":1,"completion_tokens":1}}}}"#);
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n", body.len());
            socket.write_all([head, body].concat().as_bytes()).await?;
            continue;
        }
        let head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";
        socket.write_all([head, &chunk(&event(r#"{"role":"assistant","content":""}"#))].concat().as_bytes()).await?;
        let (ended, back) = oneshot::channel();
        let stream = Stream { socket, left: LONG_TOKENS, ended };
        streams.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        socket = back.await?;
    }
}

/// An event of a stream as Chiasm writes it.
fn event(delta: &str) -> String {
    let head =
        r#""id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1800000000"#;
    let choice = format!(r#"{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":null}}"#);
    format!("data: {{{head},\"model\":\"{MODEL}\",\"choices\":[{choice}]}}\n\n")
}

/// A chunk of HTTP/1.1.
fn chunk(text: &str) -> String {
    format!("{:x}\r\n{text}\r\n", text.len())
}
