use std::path::Path;
use std::slice::from_ref;
use std::time::Duration;

use chiasm_backend::fake::{FakeBackend, FakeConnector, fake_capabilities};
use chiasm_backend::{Capabilities, Connector, Death, adapter_engine_name};
use chiasm_router::RouterConfig;

use super::*;
use crate::Patience;
use crate::adapters::Stamps;

/// A backend that takes so many adapters.
fn taking(max_loras: usize) -> FakeBackend {
    FakeBackend::with(Capabilities { max_loras, ..fake_capabilities() })
}

/// A fleet of workers with these backends, each worker's one after the other, before which these
/// adapters were served.
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

/// Waits until a backend has so many adapters.
async fn until_it_has(backend: &FakeBackend, count: usize) {
    while backend.adapters().len() != count {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn every_worker_that_takes_adapters_has_them_before_its_first_request() {
    let (dir, adapters) = (folder(), Arc::new(Adapters::new(4)));
    let source = source("a", dir.path());
    adapters.serve(&source, &AdapterFiles::look(&source, false, Stamps::Place).unwrap()).unwrap();
    let (first, next, without) = (taking(2), taking(2), taking(0));
    let fleet = fleet(&[&[first.clone(), next.clone()], &[without]], adapters.clone()).await;
    let adapter = adapters.get("a").unwrap();
    let name = adapter.engine().name.clone();
    assert_eq!(first.adapters(), from_ref(&name));
    assert_eq!(fleet.workers_without(&adapter).unwrap(), [WorkerId(1)]);
    let error = fleet.worker(WorkerId(1)).unwrap().lacks_adapter(&adapter).unwrap();
    assert!(matches!(error, AdapterError::NotEnabled));

    first.die(Death::new("out of memory"));
    until_it_has(&next, 1).await;
    assert_eq!(next.adapters(), [name]);
    assert!(fleet.wait_ready(2).await);
    assert_eq!(fleet.workers_without(&adapter).unwrap(), [WorkerId(1)]);
}

#[tokio::test]
async fn an_adapter_that_one_refuses_is_kept_by_none() {
    let dir = folder();
    let (willing, refusing) = (taking(1), taking(1));
    refusing.refuse_adapters(true);
    let fleet = fleet(&[from_ref(&willing), from_ref(&refusing)], Arc::new(Adapters::new(1))).await;
    let refused = fleet.load_adapter(source("a", dir.path()), false).await.unwrap_err();
    assert_eq!(refused.to_string(), "it was told to");
    assert!(fleet.adapters().get("a").is_none());
    until_it_has(&willing, 0).await;
    refusing.refuse_adapters(false);
    // The one place is free once all were told.
    while fleet.load_adapter(source("a", dir.path()), false).await.is_err() {
        tokio::task::yield_now().await;
    }
    assert_eq!((willing.adapters().len(), refusing.adapters().len()), (1, 1));
}

#[tokio::test]
async fn an_adapter_is_forgotten_when_the_last_request_with_it_has_ended() {
    let dir = folder();
    let backend = taking(1);
    let fleet = fleet(&[from_ref(&backend)], Arc::new(Adapters::new(2))).await;
    fleet.load_adapter(source("a", dir.path()), false).await.unwrap();
    let in_flight = fleet.adapters().get("a").unwrap();
    fleet.unload_adapter("a").await.unwrap();
    assert!(matches!(fleet.unload_adapter("a").await, Err(LoadError::NotLoaded(_))));
    assert_eq!(backend.adapters().len(), 1);
    // The same again: what ends now must not take it away.
    fleet.load_adapter(source("a", dir.path()), false).await.unwrap();
    drop(in_flight);
    tokio::time::sleep(Duration::from_millis(50)).await;
    let again = fleet.adapters().get("a").unwrap();
    assert!(fleet.workers_without(&again).unwrap().is_empty() && backend.adapters().len() == 1);
    fleet.unload_adapter("a").await.unwrap();
    drop(again);
    until_it_has(&backend, 0).await;
}

#[tokio::test]
async fn where_nobody_takes_adapters_they_are_refused() {
    let dir = folder();
    let fleet = fleet(&[&[taking(0)]], Arc::new(Adapters::new(1))).await;
    let refused = fleet.load_adapter(source("a", dir.path()), false).await;
    assert!(matches!(refused, Err(LoadError::Engine(AdapterError::NotEnabled))));
}

/// An engine of an agent that has these adapters, by their names and contents.
fn of_agent(own: &[(&str, u8, Option<&str>)]) -> FakeBackend {
    let own = own.iter().map(|&(name, content, refused)| {
        let (stamp, refused) = ([content; 8], refused.map(str::to_owned));
        let own = OwnAdapter { name: name.to_owned(), root: format!("/{content}"), stamp, refused };
        (adapter_engine_name(name, stamp), own)
    });
    FakeBackend::with(Capabilities { adapters: own.collect(), ..fake_capabilities() })
}

fn names(fleet: &Fleet) -> Vec<String> {
    fleet.adapters().all().iter().map(|adapter| adapter.engine().name.clone()).collect()
}

#[tokio::test]
async fn adapters_of_agents_are_served_where_they_are() {
    let (both, one) = (
        of_agent(&[("a", 1, None), ("m", 1, None)]),
        of_agent(&[("b", 2, Some("its rank is too large"))]),
    );
    let (own, adapters) = (taking(1), Arc::new(Adapters::new(2).beside("m")));
    let fleet = fleet(&[from_ref(&both), from_ref(&one), from_ref(&own)], adapters).await;
    // Nothing can ask for one with the model's name.
    assert_eq!(names(&fleet), ["a@0101010101010101", "b@0202020202020202"]);
    let a = fleet.adapters().get("a").unwrap();
    assert_eq!(
        (a.root.as_str(), fleet.workers_without(&a).unwrap()),
        ("/1", vec![WorkerId(1), WorkerId(2)])
    );
    let lacks = fleet.worker(WorkerId(2)).unwrap().lacks_adapter(&a);
    assert!(matches!(lacks, Some(AdapterError::NotOwn)) && own.adapters().is_empty());
    let why = fleet.workers_without(&fleet.adapters().get("b").unwrap()).unwrap_err().unwrap();
    assert_eq!(why.to_string(), "its rank is too large");
    // They are the agents' to load and unload.
    let dir = folder();
    assert!(matches!(
        fleet.load_adapter(source("a", dir.path()), true).await,
        Err(LoadError::OfAgents(_))
    ));
    assert!(matches!(fleet.unload_adapter("a").await, Err(LoadError::OfAgents(_))));
    // There are as many as there may be.
    assert!(matches!(
        fleet.load_adapter(source("c", dir.path()), false).await,
        Err(LoadError::Full(2))
    ));
}

#[tokio::test]
async fn a_name_stands_for_one_content_for_as_long_as_an_agent_has_that() {
    let (first, next) = (of_agent(&[("a", 1, None)]), of_agent(&[("b", 3, None)]));
    let fleet = fleet(&[&[first.clone(), next]], Arc::new(Adapters::new(4))).await;
    let connector = |backend: &FakeBackend| {
        Box::new(FakeConnector::new([Ok(backend.clone())])) as Box<dyn Connector>
    };
    for own in [of_agent(&[("a", 2, None)]), of_agent(&[("a", 1, None)])] {
        fleet.add(connector(&own)).unwrap();
    }
    assert!(fleet.wait_ready(3).await);
    assert_eq!(names(&fleet), ["a@0101010101010101"]);
    let a = fleet.adapters().get("a").unwrap();
    assert_eq!(fleet.workers_without(&a).unwrap(), [WorkerId(1)]);
    let why = fleet.worker(WorkerId(1)).unwrap().lacks_adapter(&a).unwrap();
    assert_eq!(why.to_string(), "its agent has another one of this name");
    // The agent of the first is started again with another adapter; the third has the content
    // still.
    first.die(Death::new("it was started again"));
    while names(&fleet) != ["a@0101010101010101", "b@0303030303030303"] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // The third goes for good: the name is free for what the second has.
    fleet.remove(WorkerId(2));
    while names(&fleet) != ["a@0202020202020202", "b@0303030303030303"] {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let a = fleet.adapters().get("a").unwrap();
    assert_eq!(fleet.workers_without(&a).unwrap(), [WorkerId(0)]);
}
