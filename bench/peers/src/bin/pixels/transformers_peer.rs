//! The peer `transformers`: a Python process that is told one round at a time.

use std::cell::RefCell;
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::rc::Rc;

use serde::{Deserialize, Serialize};

use crate::case::Case;
use crate::side::Side;
use crate::times::Times;

/// One order, as `transformers_peer.py` documents it.
#[derive(Serialize)]
struct Order<'a> {
    model: &'a Path,
    picture: &'a Path,
    format: &'static str,
    tensor: Option<&'a Path>,
}

/// Its first line.
#[derive(Deserialize)]
struct Versions {
    transformers: String,
    torch: String,
    pillow: String,
}

/// The process; it ends when its input does.
pub(crate) struct Python {
    child: Child,
    orders: Option<ChildStdin>,
    answers: BufReader<ChildStdout>,
    name: String,
}

impl Python {
    /// Starts the script and waits until it has imported what it needs.
    pub(crate) fn start(python: &Path, script: &Path) -> Result<Self, Box<dyn Error>> {
        // -I: packages and settings of the user are not those of the environment. -B: leaves no
        // __pycache__.
        let mut child = Command::new(python)
            .args(["-I", "-B"])
            .arg(script)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|error| format!("could not start {}: {error}", python.display()))?;
        let orders = child.stdin.take();
        let answers = BufReader::new(child.stdout.take().ok_or("a pipe is missing")?);
        let mut python = Self { child, orders, answers, name: String::new() };
        let versions: Versions = serde_json::from_str(&python.answer()?)?;
        let Versions { transformers, torch, pillow } = versions;
        // Behind the plus sign is what torch was built for.
        let torch = torch.split('+').next().unwrap_or_default();
        python.name = format!("transformers {transformers} (torch {torch}, Pillow {pillow})");
        Ok(python)
    }

    fn ask(&mut self, order: &Order<'_>) -> Result<Times, Box<dyn Error>> {
        let orders = self.orders.as_mut().ok_or("a pipe is missing")?;
        writeln!(orders, "{}", serde_json::to_string(order)?)?;
        orders.flush()?;
        Ok(serde_json::from_str(&self.answer()?)?)
    }

    fn answer(&mut self) -> Result<String, Box<dyn Error>> {
        let mut line = String::new();
        match self.answers.read_line(&mut line)? {
            0 => Err("the transformers peer ended: it says above why".into()),
            _ => Ok(line),
        }
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        self.orders = None;
        // It has answered every order, so that it is about to end; how does not matter any more.
        let _ = self.child.wait();
    }
}

/// The peer, set up for one case.
pub(crate) struct Transformers<'a> {
    python: Rc<RefCell<Python>>,
    case: &'a Case,
    tensor: PathBuf,
}

impl<'a> Transformers<'a> {
    /// `tensor` is a file to hand tensors over.
    pub(crate) fn open(python: Rc<RefCell<Python>>, case: &'a Case, tensor: &Path) -> Self {
        Self { python, case, tensor: tensor.to_owned() }
    }

    fn ask(&self, tensor: Option<&Path>) -> Result<Times, Box<dyn Error>> {
        let Case { format, settings, picture, .. } = self.case;
        self.python.borrow_mut().ask(&Order { model: settings, picture, format: format.name(), tensor })
    }
}

impl Side for Transformers<'_> {
    fn name(&self) -> String {
        self.python.borrow().name.clone()
    }

    fn round(&mut self) -> Result<Times, Box<dyn Error>> {
        self.ask(None)
    }

    fn tensor(&mut self) -> Result<Option<Vec<u8>>, Box<dyn Error>> {
        self.ask(Some(&self.tensor))?;
        Ok(Some(std::fs::read(&self.tensor)?))
    }
}
