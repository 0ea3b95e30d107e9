//! A child that hangs, dies or sends an invalid reply fails only its own call. The fork server of
//! these tests is a small scripted program. vLLM's own processor is tested in
//! `python/chiasm_processor` and in `chiasm`.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chiasm_processor::{
    ItemCall, ItemLimits, ItemOutput, ItemValue, KnownItem, Processor, ProcessorError,
    ProcessorOptions, Sandbox,
};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};
use serde_json::Map;
use tokio::task::JoinHandle;

/// Returns options for the fork server `tests/fork_server.py` with the given `behaviour`.
pub(crate) fn options(behaviour: &str) -> ProcessorOptions {
    ProcessorOptions {
        python: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fork_server.py"),
        model: "model".into(),
        vllm_flags: vec![behaviour.to_owned()],
        children: 2,
        queue: 1,
        timeout: Duration::from_millis(500),
        startup_timeout: Duration::from_secs(20),
        restart_pause: Duration::ZERO,
        item_bytes: 1 << 20,
        address_space: 0,
        limits: ItemLimits::default(),
        sandbox: Sandbox::Auto,
    }
}

pub(crate) async fn start() -> Processor {
    Processor::start(options("serve")).await.unwrap()
}

pub(crate) async fn item(processor: &Processor, order: &str) -> Result<ItemOutput, ProcessorError> {
    let file = Bytes::copy_from_slice(order.as_bytes());
    let none = Map::new();
    processor
        .item(ItemCall { modality: "image", file, processor_kwargs: &none, io_kwargs: &none })
        .await
}

/// Returns the id of the child that made an item.
pub(crate) fn child_of(output: &ItemOutput) -> usize {
    output.updates[0].full[0].1
}

pub(crate) fn is_alive(process: usize) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat"))
        .is_ok_and(|stat| !stat.contains(") Z "))
}

/// Waits until a process has ended.
pub(crate) async fn wait_end(process: usize) {
    let start = Instant::now();
    while is_alive(process) {
        assert!(start.elapsed() < Duration::from_secs(10), "{process} does not end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn child_is_reused_for_the_next_item() {
    let processor = start().await;
    assert_eq!(processor.greeting().limits["video"], Some(2));
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert_eq!(processor.greeting().vllm, "0 []", "no CARGO variables are passed on");
    let first = item(&processor, "make").await.unwrap();
    let ItemValue::Tensor(tensor) = &first.fields[0].value else { panic!("a tensor") };
    let mut out = [0; 4];
    first.read(tensor, &mut out).unwrap();
    assert_eq!(out, [1, 2, 3, 4]);
    let second = item(&processor, "make again").await.unwrap();
    assert_eq!(child_of(&first), child_of(&second));
    // The next item does not overwrite the first one.
    first.read(tensor, &mut out).unwrap();
    let items = [KnownItem { modality: "image", updates: &first.updates }];
    let expanded = processor.prompt(&[1, 2, 3], &items, &Map::new()).await.unwrap();
    assert_eq!((expanded.tokens.len(), expanded.placeholders[0].length), (3, 1));
    drop(processor);
    wait_end(child_of(&first)).await;
}

#[tokio::test]
async fn child_is_replaced_after_a_failure_not_a_refusal() {
    let processor = start().await;
    let mut before = child_of(&item(&processor, "make").await.unwrap());
    for (order, expected, survives) in [
        ("refuse", "ValueError: no such thing", true),
        ("die", "vLLM's processor crashed during the call", false),
        ("lie", "the field 'x' does not match its shape", false),
        ("babble", "sent an invalid reply", false),
        ("hang", "within 0.5 s", false),
    ] {
        let error = item(&processor, order).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{order}: {error}");
        let after = child_of(&item(&processor, "make").await.unwrap());
        assert_eq!(before == after, survives, "{order}");
        if !survives {
            wait_end(before).await;
        }
        before = after;
    }
}

#[tokio::test]
async fn calls_beyond_the_queue_are_refused() {
    let processor = Arc::new(start().await);
    let start = Instant::now();
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let processor = processor.clone();
            tokio::spawn(async move { item(&processor, "hang").await.unwrap_err() })
        })
        .collect();
    let mut refused = 0;
    for call in calls {
        match call.await.unwrap() {
            ProcessorError::QueueFull => refused += 1,
            ProcessorError::TimedOut { .. } => {}
            error => panic!("{error}"),
        }
    }
    // Two of the five calls run, one waits, and the queue has no room for the other two.
    assert_eq!(refused, 2);
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    item(&processor, "make").await.unwrap();
}

#[tokio::test]
async fn cancelled_call_kills_its_child() {
    let processor = start().await;
    let output = item(&processor, "make").await.unwrap();
    let cancelled =
        tokio::time::timeout(Duration::from_millis(100), item(&processor, "hang")).await;
    assert!(cancelled.is_err());
    wait_end(child_of(&output)).await;
    item(&processor, "make").await.unwrap();
}

type PendingItem = JoinHandle<Result<ItemOutput, ProcessorError>>;

/// Begins an item that is made once `path` exists. Returns when a child has received the call, with
/// the id of the fork server.
async fn begin(processor: &Processor, path: &Path) -> (PendingItem, usize) {
    let output = item(processor, "make").await.unwrap();
    let server = parent_of(child_of(&output));
    let order = format!("wait {}", path.display());
    let processor = processor.clone();
    let pending = tokio::spawn(async move { item(&processor, &order).await });
    wait_for_file(&path.with_extension("begun")).await;
    (pending, server)
}

async fn wait_for_file(path: &Path) {
    let start = Instant::now();
    while !path.exists() {
        assert!(start.elapsed() < Duration::from_secs(60), "{} does not appear", path.display());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns the parent of a process; for a child, its fork server.
fn parent_of(child: usize) -> usize {
    let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn send(signal: Signal, process: usize) {
    let pid = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
    if signal == Signal::STOP {
        // Until all of its threads have stopped, the process may still answer.
        let options = WaitIdOptions::STOPPED | WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), options).unwrap();
    }
}

#[tokio::test]
async fn failed_fork_costs_its_own_item_only() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let timeout = Duration::from_secs(60);
    let options = ProcessorOptions { timeout, ..options("second-fork-fails") };
    let processor = Processor::start(options).await.unwrap();
    let (first, server) = begin(&processor, &go).await;
    let error = item(&processor, "make").await.unwrap_err();
    assert!(
        matches!(&error, ProcessorError::Unavailable(why) if why.contains("immediately")),
        "{error}"
    );
    let third = item(&processor, "make").await.unwrap();
    std::fs::write(go, "").unwrap();
    let first = first.await.unwrap().unwrap();
    assert_eq!(parent_of(child_of(&first)), server);
    assert_eq!(parent_of(child_of(&third)), server);
}

#[tokio::test]
async fn server_that_ends_is_replaced_without_a_request() {
    let folder = tempfile::tempdir().unwrap();
    let starts = || std::fs::read_to_string(folder.path().join("starts")).unwrap().lines().count();
    let timeout = Duration::from_secs(60);
    let behaviour = format!("log={}", folder.path().display());
    let options = ProcessorOptions { timeout, ..options(&behaviour) };
    let processor = Processor::start(options).await.unwrap();
    let output = item(&processor, "make").await.unwrap();
    let (hanging, server) = begin(&processor, &folder.path().join("never")).await;
    send(Signal::KILL, server);
    send(Signal::KILL, child_of(&output));
    // The error blames the server's exit, not the item.
    let error = hanging.await.unwrap().unwrap_err();
    assert!(matches!(error, ProcessorError::Unavailable(_)), "{error}");
    wait_for_file(&folder.path().join("restarted")).await;
    // A cancelled request neither cancels the start nor begins another one.
    for _ in 0..3 {
        let impatient = tokio::time::timeout(Duration::from_millis(10), item(&processor, "make"));
        assert!(impatient.await.is_err());
    }
    std::fs::write(folder.path().join("go"), "").unwrap();
    let again = item(&processor, "make").await.unwrap();
    assert_ne!(parent_of(child_of(&again)), server);
    assert_eq!(starts(), 2);
}

/// A failed restart is reported as temporary, unlike a failed first start.
#[tokio::test]
async fn failed_restart_leaves_the_processor_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let behaviour = format!("log={}", folder.path().display());
    let restart_pause = Duration::from_millis(100);
    let timeout = Duration::from_secs(60);
    let options = ProcessorOptions { restart_pause, timeout, ..options(&behaviour) };
    let processor = Processor::start(options).await.unwrap();
    let output = item(&processor, "make").await.unwrap();
    for name in ["fail", "go"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let server = parent_of(child_of(&output));
    send(Signal::KILL, server);
    wait_end(server).await;
    let start = Instant::now();
    loop {
        let error = item(&processor, "make").await.unwrap_err();
        assert!(matches!(error, ProcessorError::Unavailable(_)), "{error}");
        if error.to_string().contains("takes no media") {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn server_that_stops_forking_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let timeout = Duration::from_secs(3600);
    let options = ProcessorOptions { timeout, ..options("serve") };
    let processor = Processor::start(options).await.unwrap();
    let (first, server) = begin(&processor, &go).await;
    send(Signal::STOP, server);
    // The stopped server does not answer: the paused clock advances to the timeout of each fork.
    tokio::time::pause();
    for _ in 0..2 {
        let error = item(&processor, "make").await.unwrap_err();
        assert!(
            matches!(&error, ProcessorError::Unavailable(why) if why.contains("did not start")),
            "{error}"
        );
    }
    tokio::time::resume();
    let again = item(&processor, "make").await.unwrap();
    assert_ne!(parent_of(child_of(&again)), server);
    std::fs::write(go, "").unwrap();
    // The old server's child finishes its item, and then both end.
    wait_end(child_of(&first.await.unwrap().unwrap())).await;
    wait_end(server).await;
}

#[tokio::test]
async fn hung_server_is_replaced_although_callers_give_up() {
    let folder = tempfile::tempdir().unwrap();
    let timeout = Duration::from_secs(3600);
    let options = ProcessorOptions { timeout, ..options("serve") };
    let processor = Processor::start(options).await.unwrap();
    let (first, server) = begin(&processor, &folder.path().join("never")).await;
    send(Signal::STOP, server);
    tokio::time::pause();
    for _ in 0..2 {
        let impatient = tokio::time::timeout(Duration::from_secs(1), item(&processor, "make"));
        assert!(impatient.await.is_err());
    }
    // The time limit of both forks.
    tokio::time::sleep(Duration::from_secs(30)).await;
    tokio::time::resume();
    let again = item(&processor, "make").await.unwrap();
    assert_ne!(parent_of(child_of(&again)), server);
    first.abort();
    wait_end(server).await;
}

#[tokio::test]
async fn failed_start_reports_its_reason() {
    let error = Processor::start(options("fail")).await.err().unwrap();
    assert!(
        matches!(&error, ProcessorError::Unsupported(why) if why.contains("takes no media")),
        "{error}"
    );
    let error = Processor::start(options("vanish")).await.err().unwrap();
    assert!(
        matches!(&error, ProcessorError::Unavailable(why) if why.contains("the last words")),
        "{error}"
    );
    let nothing = ProcessorOptions { python: "/no/such/python".into(), ..options("serve") };
    assert!(matches!(
        Processor::start(nothing).await.err().unwrap(),
        ProcessorError::NoPython { .. }
    ));
}
