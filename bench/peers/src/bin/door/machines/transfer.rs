//! Bytes over a TCP connection, without TLS and without anybody who would do something with them:
//! less than what anything that has to be sent can take.

use std::error::Error;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Command;
use std::time::{Duration, Instant};

use peers::programs::free_address;
use serde::Deserialize;

use crate::machines::machine::Machine;
use crate::program::Program;
use crate::side::Inputs;

/// Bytes of the tensors that our binary makes of the picture at this URL.
pub(crate) fn tensor_bytes(inputs: &Inputs, url: &str) -> Result<usize, Box<dyn Error>> {
    #[derive(Deserialize)]
    struct Inspected {
        tensors: Vec<Tensor>,
    }
    #[derive(Deserialize)]
    struct Tensor {
        dtype: String,
        shape: Vec<usize>,
    }
    let output =
        Command::new(&inputs.chiasm).args(["inspect", "--json", "--model"]).arg(&inputs.model).arg(url).output()?;
    let inspected: Inspected = serde_json::from_slice(&output.stdout)?;
    let bytes = inspected.tensors.iter().map(|Tensor { dtype, shape }| {
        let size = match dtype.as_str() {
            "uint8" => 1,
            "int64" => 8,
            _ => return Err(format!("a tensor is of {dtype}")),
        };
        Ok(size * shape.iter().product::<usize>())
    });
    Ok(bytes.sum::<Result<usize, _>>()?)
}

/// Takes a length, that many bytes into memory that is there, and answers with one; until it is
/// killed.
pub(crate) fn sink(listen: SocketAddr) -> Result<(), Box<dyn Error>> {
    let mut memory = Vec::new();
    for stream in TcpListener::bind(listen)?.incoming() {
        let mut stream = stream?;
        stream.set_nodelay(true)?;
        let mut length = [0; 8];
        while stream.read_exact(&mut length).is_ok() {
            memory.resize(usize::try_from(u64::from_le_bytes(length))?, 0);
            stream.read_exact(&mut memory)?;
            stream.write_all(&[0])?;
        }
    }
    Ok(())
}

/// A connection to such a program on a machine.
pub(crate) struct Transfer {
    stream: TcpStream,
    /// Ends with this value.
    _sink: Program,
}

impl Transfer {
    pub(crate) fn start(inputs: &Inputs, machine: &Machine) -> Result<Self, Box<dyn Error>> {
        let listen = SocketAddr::new(machine.host, free_address()?.port());
        let mut command = machine.command(&std::env::current_exe()?);
        command.args(["sink", "--listen", &listen.to_string()]);
        let mut sink = Program::start(&format!("sink, {}", machine.link), &mut command, &inputs.scratch)?;
        sink.listens(listen)?;
        let stream = TcpStream::connect(listen)?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, _sink: sink })
    }

    /// The time from the first of these bytes until the answer to the last.
    pub(crate) fn send(&mut self, bytes: &[u8]) -> Result<Duration, Box<dyn Error>> {
        let start = Instant::now();
        self.stream.write_all(&(bytes.len() as u64).to_le_bytes())?;
        self.stream.write_all(bytes)?;
        self.stream.read_exact(&mut [0])?;
        Ok(start.elapsed())
    }
}
