use std::path::Path;
use std::slice::from_ref;
use std::time::Duration;

use chiasm_backend::fake::{FakeBackend, FakeConnector, fake_capabilities};
use chiasm_backend::{Capabilities, Connector, DeathReason, adapter_engine_name};
use chiasm_router::RouterConfig;

use super::*;
use crate::Patience;
use crate::adapters::StampSource;

/// Creates a backend for at most `max_loras` adapters.
fn backend(max_loras: usize) -> FakeBackend {
    FakeBackend::with_capabilities(Capabilities { max_loras, ..fake_capabilities() })
}

/// Starts a fleet that serves `adapters`. Each worker connects to its `backends` in turn.
async fn fleet(workers: &[&[FakeBackend]], adapters: Arc<Adapters>) -> Arc<Fleet> {
    let connector = |backends: &&[FakeBackend]| {
        Box::new(FakeConnector::new(backends.iter().cloned().map(Ok))) as Box<dyn Connector>
    };
    let connectors = workers.iter().map(connector).collect();
    let fleet = Fleet::start_with_adapters(
        connectors,
        RouterConfig::default(),
        Patience::default(),
        adapters,
    )
    .unwrap();
    assert!(fleet.wait_ready(workers.len()).await);
    fleet
}

fn source(name: &str, path: &Path) -> AdapterSource {
    AdapterSource { name: name.to_owned(), path: path.display().to_string() }
}

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("adapter_config.json"), r#"{"r": 8}"#).unwrap();
    folder
}

/// Waits until a backend has `count` adapters.
async fn wait_for_adapters(backend: &FakeBackend, count: usize) {
    while backend.adapters().len() != count {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn worker_loads_adapters_before_first_request() {
    let dir = folder();
    let adapters = Arc::new(Adapters::new(4));
    let source = source("a", dir.path());
    let files = AdapterFiles::inspect(&source, false, StampSource::Metadata).unwrap();
    adapters.serve(&source, &files).unwrap();
    let first = backend(2);
    let next = backend(2);
    let without = backend(0);
    let fleet = fleet(&[&[first.clone(), next.clone()], &[without]], adapters.clone()).await;
    let adapter = adapters.get("a").unwrap();
    let name = adapter.engine().name.clone();
    assert_eq!(first.adapters(), from_ref(&name));
    assert_eq!(fleet.workers_without(&adapter).unwrap(), [WorkerId(1)]);
    let error = fleet.worker(WorkerId(1)).unwrap().adapter_error(&adapter).unwrap();
    assert!(matches!(error, AdapterError::NotEnabled));

    first.die(DeathReason::new("out of memory"));
    wait_for_adapters(&next, 1).await;
    assert_eq!(next.adapters(), [name]);
    assert!(fleet.wait_ready(2).await);
    assert_eq!(fleet.workers_without(&adapter).unwrap(), [WorkerId(1)]);
}

#[tokio::test]
async fn refused_adapter_is_unloaded_everywhere() {
    let dir = folder();
    let willing = backend(1);
    let refusing = backend(1);
    refusing.refuse_adapters(true);
    let fleet = fleet(&[from_ref(&willing), from_ref(&refusing)], Arc::new(Adapters::new(1))).await;
    let refused = fleet.load_adapter(source("a", dir.path()), false).await.unwrap_err();
    assert_eq!(refused.to_string(), "refused by the fake backend");
    assert!(fleet.adapters().get("a").is_none());
    wait_for_adapters(&willing, 0).await;
    refusing.refuse_adapters(false);
    // The limit of one adapter is free again once it is unloaded everywhere.
    while fleet.load_adapter(source("a", dir.path()), false).await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!((willing.adapters().len(), refusing.adapters().len()), (1, 1));
}

#[tokio::test]
async fn adapter_is_unloaded_after_its_last_request() {
    let dir = folder();
    let backend = backend(1);
    let fleet = fleet(&[from_ref(&backend)], Arc::new(Adapters::new(2))).await;
    fleet.load_adapter(source("a", dir.path()), false).await.unwrap();
    let in_flight = fleet.adapters().get("a").unwrap();
    fleet.unload_adapter("a").await.unwrap();
    assert!(matches!(fleet.unload_adapter("a").await, Err(LoadError::NotLoaded(_))));
    assert_eq!(backend.adapters().len(), 1);
    // Loaded again with the same content: the end of the old request must not unload it.
    fleet.load_adapter(source("a", dir.path()), false).await.unwrap();
    drop(in_flight);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let again = fleet.adapters().get("a").unwrap();
    assert!(fleet.workers_without(&again).unwrap().is_empty() && backend.adapters().len() == 1);
    fleet.unload_adapter("a").await.unwrap();
    drop(again);
    wait_for_adapters(&backend, 0).await;
}

#[tokio::test]
async fn adapter_is_refused_without_supporting_worker() {
    let dir = folder();
    let fleet = fleet(&[&[backend(0)]], Arc::new(Adapters::new(1))).await;
    let refused = fleet.load_adapter(source("a", dir.path()), false).await;
    assert!(matches!(refused, Err(LoadError::Engine(AdapterError::NotEnabled))));
}

/// Creates an agent's engine with preloaded adapters: name, content and error of each.
fn preloaded(adapters: &[(&str, u8, Option<&str>)]) -> FakeBackend {
    let adapters = adapters.iter().map(|&(name, content, refused)| {
        let stamp = [content; 8];
        let adapter = PreloadedAdapter {
            name: name.to_owned(),
            root: format!("/{content}"),
            stamp,
            refused: refused.map(str::to_owned),
        };
        (adapter_engine_name(name, stamp), adapter)
    });
    let adapters = adapters.collect();
    FakeBackend::with_capabilities(Capabilities { adapters, ..fake_capabilities() })
}

fn names(fleet: &Fleet) -> Vec<String> {
    fleet.adapters().all().iter().map(|adapter| adapter.engine().name.clone()).collect()
}

#[tokio::test]
async fn preloaded_adapters_are_served_by_their_agents() {
    let both = preloaded(&[("a", 1, None), ("m", 1, None)]);
    let one = preloaded(&[("b", 2, Some("its rank is too large"))]);
    let local = backend(1);
    let adapters = Arc::new(Adapters::new(2).with_model("m"));
    let fleet = fleet(&[from_ref(&both), from_ref(&one), from_ref(&local)], adapters).await;
    // The adapter with the model's name is not served.
    assert_eq!(names(&fleet), ["a@0101010101010101", "b@0202020202020202"]);
    let a = fleet.adapters().get("a").unwrap();
    assert_eq!(
        (a.root.as_str(), fleet.workers_without(&a).unwrap()),
        ("/1", vec![WorkerId(1), WorkerId(2)])
    );
    let error = fleet.worker(WorkerId(2)).unwrap().adapter_error(&a);
    assert!(matches!(error, Some(AdapterError::NotPreloaded)) && local.adapters().is_empty());
    let why = fleet.workers_without(&fleet.adapters().get("b").unwrap()).unwrap_err().unwrap();
    assert_eq!(why.to_string(), "its rank is too large");
    // Only the agents may load and unload them.
    let dir = folder();
    assert!(matches!(
        fleet.load_adapter(source("a", dir.path()), true).await,
        Err(LoadError::OwnedByAgents(_))
    ));
    assert!(matches!(fleet.unload_adapter("a").await, Err(LoadError::OwnedByAgents(_))));
    // The limit is reached.
    assert!(matches!(
        fleet.load_adapter(source("c", dir.path()), false).await,
        Err(LoadError::Full(2))
    ));
}

#[tokio::test]
async fn name_keeps_content_while_agent_has_it() {
    let first = preloaded(&[("a", 1, None)]);
    let next = preloaded(&[("b", 3, None)]);
    let fleet = fleet(&[&[first.clone(), next]], Arc::new(Adapters::new(4))).await;
    let connector = |backend: &FakeBackend| {
        Box::new(FakeConnector::new([Ok(backend.clone())])) as Box<dyn Connector>
    };
    for backend in [preloaded(&[("a", 2, None)]), preloaded(&[("a", 1, None)])] {
        fleet.add(connector(&backend)).unwrap();
    }
    assert!(fleet.wait_ready(3).await);
    assert_eq!(names(&fleet), ["a@0101010101010101"]);
    let a = fleet.adapters().get("a").unwrap();
    assert_eq!(fleet.workers_without(&a).unwrap(), [WorkerId(1)]);
    let why = fleet.worker(WorkerId(1)).unwrap().adapter_error(&a).unwrap();
    assert_eq!(why.to_string(), "the agent has another adapter of this name");
    // The first agent restarts with another adapter, and the third agent still has the content.
    first.die(DeathReason::new("restarted"));
    while names(&fleet) != ["a@0101010101010101", "b@0303030303030303"] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The third agent is removed, so the name goes to the content of the second.
    fleet.remove(WorkerId(2));
    while names(&fleet) != ["a@0202020202020202", "b@0303030303030303"] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let a = fleet.adapters().get("a").unwrap();
    assert_eq!(fleet.workers_without(&a).unwrap(), [WorkerId(0)]);
}
