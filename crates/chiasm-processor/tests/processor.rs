//! Children that hang, die and lie cost the call that they were given, and no other. The fork
//! server here is a small program that does as it is told; vLLM's own processor is in the tests of
//! `python/chiasm_processor` and of `chiasm`.
#![allow(clippy::expect_used, clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use chiasm_processor::{
    ItemCall, ItemLimits, ItemValue, KnownItem, MadeItem, Processor, ProcessorError,
    ProcessorOptions, Sandbox,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Map;
use tokio::task::JoinHandle;

fn options(fate: &str) -> ProcessorOptions {
    ProcessorOptions {
        python: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fork_server.py"),
        model: "model".into(),
        vllm_flags: vec![fate.to_owned()],
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

async fn start() -> Processor {
    Processor::start(options("serve")).await.unwrap()
}

async fn item(processor: &Processor, order: &str) -> Result<MadeItem, ProcessorError> {
    let (file, none) = (Bytes::copy_from_slice(order.as_bytes()), Map::new());
    processor
        .item(ItemCall { modality: "image", file, processor_kwargs: &none, io_kwargs: &none })
        .await
}

/// The process that made an item.
fn maker(made: &MadeItem) -> usize {
    made.updates[0].full[0].1
}

fn is_alive(process: usize) -> bool {
    std::fs::read_to_string(format!("/proc/{process}/stat"))
        .is_ok_and(|stat| !stat.contains(") Z "))
}

async fn ends(process: usize) {
    let begun = Instant::now();
    while is_alive(process) {
        assert!(begun.elapsed() < Duration::from_secs(10), "{process} does not end");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn an_item_is_made_by_a_child_that_is_used_again() {
    let processor = start().await;
    assert_eq!(processor.greeting().limits["video"], Some(2));
    assert!(std::env::var_os("CARGO_MANIFEST_DIR").is_some());
    assert_eq!(processor.greeting().vllm, "0 []", "variables that came along");
    let made = item(&processor, "make").await.unwrap();
    let ItemValue::Tensor(tensor) = &made.fields[0].value else { panic!("a tensor") };
    let mut out = [0; 4];
    made.read(tensor, &mut out).unwrap();
    assert_eq!(out, [1, 2, 3, 4]);
    let again = item(&processor, "make again").await.unwrap();
    assert_eq!(maker(&made), maker(&again));
    // What was made stays, whatever is made after it.
    made.read(tensor, &mut out).unwrap();
    let items = [KnownItem { modality: "image", updates: &made.updates }];
    let expanded = processor.prompt(&[1, 2, 3], &items, &Map::new()).await.unwrap();
    assert_eq!((expanded.tokens.len(), expanded.placeholders[0].length), (3, 1));
    drop(processor);
    ends(maker(&made)).await;
}

#[tokio::test]
async fn a_child_that_fails_is_replaced_and_one_that_refuses_is_not() {
    let processor = start().await;
    let mut before = maker(&item(&processor, "make").await.unwrap());
    for (order, expected, goes_on) in [
        ("refuse", "ValueError: no such thing", true),
        ("die", "vLLM's processor broke down over it", false),
        ("lie", "the field 'x' does not fit its shape", false),
        ("babble", "makes no sense", false),
        ("hang", "within 0.5 s", false),
    ] {
        let error = item(&processor, order).await.unwrap_err();
        assert!(error.to_string().contains(expected), "{order}: {error}");
        let after = maker(&item(&processor, "make").await.unwrap());
        assert_eq!(before == after, goes_on, "{order}");
        if !goes_on {
            ends(before).await;
        }
        before = after;
    }
}

#[tokio::test]
async fn calls_wait_for_children_and_only_so_many() {
    let processor = Arc::new(start().await);
    let begun = Instant::now();
    let calls: Vec<_> = (0..5)
        .map(|_| {
            let processor = processor.clone();
            tokio::spawn(async move { item(&processor, "hang").await.unwrap_err() })
        })
        .collect();
    let mut busy = 0;
    for call in calls {
        match call.await.unwrap() {
            ProcessorError::Busy => busy += 1,
            ProcessorError::TimedOut { .. } => {}
            error => panic!("{error}"),
        }
    }
    // Two at once, one that waits for them, and no room for the others.
    assert_eq!(busy, 2);
    assert!(begun.elapsed() >= Duration::from_secs(1), "{:?}", begun.elapsed());
    item(&processor, "make").await.unwrap();
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_ends_with_its_child() {
    let processor = start().await;
    let made = item(&processor, "make").await.unwrap();
    let abandoned =
        tokio::time::timeout(Duration::from_millis(100), item(&processor, "hang")).await;
    assert!(abandoned.is_err());
    ends(maker(&made)).await;
    item(&processor, "make").await.unwrap();
}

type Begun = JoinHandle<Result<MadeItem, ProcessorError>>;

/// Begins an item that is made once `path` exists. Returns when a child has it, with its fork
/// server.
async fn begin(processor: &Processor, path: &Path) -> (Begun, usize) {
    let made = item(processor, "make").await.unwrap();
    let server = server_of(maker(&made));
    let order = format!("wait {}", path.display());
    let processor = processor.clone();
    let begun = tokio::spawn(async move { item(&processor, &order).await });
    exists(&path.with_extension("begun")).await;
    (begun, server)
}

async fn exists(path: &Path) {
    let begun = Instant::now();
    while !path.exists() {
        assert!(begun.elapsed() < Duration::from_secs(60), "{} does not appear", path.display());
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The process that a child was forked off.
fn server_of(child: usize) -> usize {
    let stat = std::fs::read_to_string(format!("/proc/{child}/stat")).unwrap();
    stat.rsplit_once(')').unwrap().1.split_whitespace().nth(1).unwrap().parse().unwrap()
}

fn send(signal: Signal, process: usize) {
    let pid = Pid::from_raw(i32::try_from(process).unwrap()).unwrap();
    kill_process(pid, signal).unwrap();
}

#[tokio::test]
async fn failed_fork_costs_its_own_item_only() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let patient = Duration::from_secs(60);
    let options = ProcessorOptions { timeout: patient, ..options("second-fork-fails") };
    let processor = Processor::start(options).await.unwrap();
    let (first, server) = begin(&processor, &go).await;
    let error = item(&processor, "make").await.unwrap_err();
    assert!(matches!(&error, ProcessorError::Gone(why) if why.contains("at once")), "{error}");
    let third = item(&processor, "make").await.unwrap();
    std::fs::write(go, "").unwrap();
    let first = first.await.unwrap().unwrap();
    assert_eq!((server_of(maker(&first)), server_of(maker(&third))), (server, server));
}

#[tokio::test]
async fn server_that_ends_is_replaced_without_a_request() {
    let folder = tempfile::tempdir().unwrap();
    let starts = || std::fs::read_to_string(folder.path().join("starts")).unwrap().lines().count();
    let patient = Duration::from_secs(60);
    let fate = format!("log={}", folder.path().display());
    let processor = Processor::start(ProcessorOptions { timeout: patient, ..options(&fate) }).await;
    let processor = processor.unwrap();
    let made = item(&processor, "make").await.unwrap();
    let (hanging, server) = begin(&processor, &folder.path().join("never")).await;
    send(Signal::KILL, server);
    send(Signal::KILL, maker(&made));
    // The item did not end it.
    let error = hanging.await.unwrap().unwrap_err();
    assert!(matches!(error, ProcessorError::Gone(_)), "{error}");
    exists(&folder.path().join("restarted")).await;
    // A request that gives up does not end the start, nor begin another one.
    for _ in 0..3 {
        let impatient = tokio::time::timeout(Duration::from_millis(10), item(&processor, "make"));
        assert!(impatient.await.is_err());
    }
    std::fs::write(folder.path().join("go"), "").unwrap();
    let again = item(&processor, "make").await.unwrap();
    assert_ne!(server_of(maker(&again)), server);
    assert_eq!(starts(), 2);
}

/// Items are worth another try then, which a processor that was never there is not.
#[tokio::test]
async fn failed_restart_leaves_the_processor_unavailable() {
    let folder = tempfile::tempdir().unwrap();
    let fate = format!("log={}", folder.path().display());
    let pause = Duration::from_millis(100);
    let patient = Duration::from_secs(60);
    let options = ProcessorOptions { restart_pause: pause, timeout: patient, ..options(&fate) };
    let processor = Processor::start(options).await.unwrap();
    let made = item(&processor, "make").await.unwrap();
    for name in ["fail", "go"] {
        std::fs::write(folder.path().join(name), "").unwrap();
    }
    let server = server_of(maker(&made));
    send(Signal::KILL, server);
    ends(server).await;
    let begun = Instant::now();
    loop {
        let error = item(&processor, "make").await.unwrap_err();
        assert!(matches!(error, ProcessorError::Gone(_)), "{error}");
        if error.to_string().contains("takes no media") {
            break;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{error}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn server_that_forks_no_more_is_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let go = folder.path().join("go");
    let patient = Duration::from_secs(3600);
    let options = ProcessorOptions { timeout: patient, ..options("serve") };
    let processor = Processor::start(options).await.unwrap();
    let (first, server) = begin(&processor, &go).await;
    send(Signal::STOP, server);
    // Nothing answers: time moves on to the deadline of each fork.
    tokio::time::pause();
    for _ in 0..2 {
        let error = item(&processor, "make").await.unwrap_err();
        assert!(matches!(&error, ProcessorError::Gone(why) if why.contains("begin")), "{error}");
    }
    tokio::time::resume();
    let again = item(&processor, "make").await.unwrap();
    assert_ne!(server_of(maker(&again)), server);
    std::fs::write(go, "").unwrap();
    // Its item goes on, and then nothing needs it any more.
    ends(maker(&first.await.unwrap().unwrap())).await;
    ends(server).await;
}

#[tokio::test]
async fn hung_server_is_replaced_although_callers_give_up() {
    let folder = tempfile::tempdir().unwrap();
    let patient = Duration::from_secs(3600);
    let options = ProcessorOptions { timeout: patient, ..options("serve") };
    let processor = Processor::start(options).await.unwrap();
    let (first, server) = begin(&processor, &folder.path().join("never")).await;
    send(Signal::STOP, server);
    tokio::time::pause();
    for _ in 0..2 {
        let impatient = tokio::time::timeout(Duration::from_secs(1), item(&processor, "make"));
        assert!(impatient.await.is_err());
    }
    // Both forks are given up within this.
    tokio::time::sleep(Duration::from_secs(30)).await;
    tokio::time::resume();
    let again = item(&processor, "make").await.unwrap();
    assert_ne!(server_of(maker(&again)), server);
    first.abort();
    ends(server).await;
}

#[tokio::test]
async fn what_can_t_be_started_says_why() {
    let error = Processor::start(options("fail")).await.err().unwrap();
    assert!(
        matches!(&error, ProcessorError::NotServed(why) if why.contains("takes no media")),
        "{error}"
    );
    let error = Processor::start(options("vanish")).await.err().unwrap();
    assert!(
        matches!(&error, ProcessorError::Gone(why) if why.contains("the last words")),
        "{error}"
    );
    let nothing = ProcessorOptions { python: "/no/such/python".into(), ..options("serve") };
    assert!(matches!(
        Processor::start(nothing).await.err().unwrap(),
        ProcessorError::NoPython { .. }
    ));
}
