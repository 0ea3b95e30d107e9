use std::net::Ipv4Addr;
use std::sync::Mutex;
use std::sync::mpsc::{Sender, channel};

use chiasm_limit::Owner;
use futures_util::future::{join_all, try_join_all};
use futures_util::poll;

use super::*;

/// A thread that is kept busy until this is dropped.
struct Held {
    _until: Sender<()>,
}

fn pool(threads: usize) -> CpuPool {
    CpuPool::new(threads, &CpuMetrics::default())
}

fn ticket(price: Duration) -> Ticket {
    CpuBudget::shared().ticket(price).unwrap()
}

fn of_owner(number: u8) -> CpuBudget {
    CpuBudget::new(Owner::Address(Ipv4Addr::new(192, 0, 2, number)), Duration::MAX)
}

/// Keeps one thread of the lane for this price busy. When this returns the thread is.
async fn hold(pool: &CpuPool, price: Duration) -> Held {
    let (until, ended) = channel::<()>();
    let (begun, began) = oneshot::channel();
    let (pool, ticket) = (pool.clone(), ticket(price));
    let job = move || {
        begun.send(()).unwrap();
        let _ = ended.recv();
    };
    tokio::spawn(async move { pool.run(&ticket, job).await });
    began.await.unwrap();
    Held { _until: until }
}

const USUAL: Duration = Duration::from_millis(50);
const DEAR: Duration = Duration::from_secs(2);

#[tokio::test]
async fn no_more_jobs_of_a_size_run_at_once_than_allowed() {
    for (price, allowed) in [(SHORT, 4), (USUAL, 3), (DEAR, 2)] {
        let pool = pool(3);
        let mut held = Vec::new();
        for _ in 0..allowed {
            held.push(hold(&pool, price).await);
        }
        let ticket = ticket(price);
        let mut more = Box::pin(pool.run(&ticket, || 7));
        assert!(poll!(&mut more).is_pending());
        assert_eq!(pool.lane(price).busy(), allowed);
        held.pop();
        assert_eq!(more.await.unwrap(), 7);
    }
}

#[tokio::test]
async fn short_work_waits_for_no_other() {
    let pool = pool(1);
    let _held = [hold(&pool, USUAL).await, hold(&pool, DEAR).await];
    assert_eq!(pool.run(&ticket(SHORT), || 7).await.unwrap(), 7);
}

#[tokio::test]
async fn a_request_that_asks_for_little_goes_before_the_rest_of_one_that_asks_for_much() {
    let pool = pool(1);
    let held = hold(&pool, USUAL).await;
    let done = Arc::new(Mutex::new(Vec::new()));
    let job = |name: &'static str, budget: &CpuBudget| {
        let (pool, ticket, done) = (pool.clone(), budget.ticket(USUAL).unwrap(), done.clone());
        async move { pool.run(&ticket, move || done.lock().unwrap().push(name)).await.unwrap() }
    };
    let (greedy, modest) = (of_owner(1), of_owner(1));
    // Polled in this order, so asked for in this order.
    let all = join_all([
        job("first", &greedy),
        job("second", &greedy),
        job("third", &greedy),
        job("other", &modest),
    ]);
    let mut all = Box::pin(all);
    assert!(poll!(&mut all).is_pending());
    drop(held);
    all.await;
    assert_eq!(*done.lock().unwrap(), ["first", "other", "second", "third"]);

    // The same where each piece is a request of its own, but those of one owner.
    let held = hold(&pool, USUAL).await;
    let requests = [of_owner(1), of_owner(1), of_owner(1), of_owner(2)];
    let names = ["first", "second", "third", "other"];
    let mut all =
        Box::pin(join_all(names.iter().zip(&requests).map(|(name, budget)| job(name, budget))));
    assert!(poll!(&mut all).is_pending());
    done.lock().unwrap().clear();
    drop(held);
    all.await;
    assert_eq!(*done.lock().unwrap(), ["first", "other", "second", "third"]);
}

#[tokio::test]
async fn work_that_nobody_awaits_is_not_begun() {
    let metrics = CpuMetrics::default();
    let pool = CpuPool::new(1, &metrics);
    let held = hold(&pool, USUAL).await;
    let (used, unused) = (Arc::new(()), ticket(USUAL));
    let job = {
        let used = used.clone();
        move || drop(used)
    };
    let mut waiting = Box::pin(pool.run(&unused, job));
    assert!(poll!(&mut waiting).is_pending());
    assert_eq!(metrics.lane("usual").waiting.get(), 1);
    drop(waiting);
    // The job and all that it holds are gone while the thread is still busy.
    assert_eq!((Arc::strong_count(&used), metrics.lane("usual").waiting.get()), (1, 0));
    drop(held);
}

#[tokio::test]
async fn a_panicking_job_is_an_error_and_costs_no_thread() {
    let (pool, budget) = (pool(1), of_owner(1));
    for small in [true, false] {
        let error = pool
            .run_or_here::<()>(small, &budget, USUAL, || panic!("on purpose"))
            .await
            .unwrap_err();
        assert!(matches!(error, CpuError::Failed));
        assert_eq!(pool.run(&ticket(USUAL), || 7).await.unwrap(), 7);
    }
}

#[tokio::test]
async fn what_is_too_costly_is_not_begun() {
    let (pool, budget) = (pool(1), CpuBudget::new(Owner::Address(Ipv4Addr::LOCALHOST), DEAR));
    let error =
        pool.run_or_here(false, &budget, 2 * DEAR, || unreachable!("not begun")).await.unwrap_err();
    assert!(matches!(error, CpuError::TooCostly { .. }));
    // What is done here is no burden to others.
    pool.run_or_here(true, &budget, 2 * DEAR, || ()).await.unwrap();
}

#[tokio::test]
async fn a_request_whose_work_takes_far_longer_than_its_price_gets_no_more() {
    let (pool, limit) = (pool(1), Duration::from_millis(2));
    let budget = CpuBudget::new(Owner::Address(Ipv4Addr::LOCALHOST), limit);
    let [dear, waiting] = [(); 2].map(|()| budget.ticket(Duration::from_micros(1)).unwrap());
    let work = move || {
        let begun = thread_time();
        while thread_time() - begun < limit {}
    };
    pool.run(&dear, work).await.unwrap();
    let error = pool.run(&waiting, || unreachable!("not begun")).await.unwrap_err();
    assert!(matches!(error, CpuError::TooCostly { .. }));
    assert_eq!(pool.run(&ticket(USUAL), || 7).await.unwrap(), 7);
}

#[tokio::test]
async fn the_threads_end_with_the_pool() {
    let pool = pool(2);
    try_join_all((0..8).map(|_| async { pool.run(&ticket(USUAL), || ()).await })).await.unwrap();
    let lane = Arc::downgrade(pool.lane(USUAL));
    drop(pool);
    // Each thread has the lane.
    while lane.upgrade().is_some() {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_thread_without_work_ends_and_another_starts_when_there_is_some() {
    let lane = Arc::new(Lane::new("usual", 1, 0, Duration::ZERO, &CpuMetrics::default()));
    for _ in 0..3 {
        let (done, outcome) = oneshot::channel();
        let _place =
            lane.push(None, USUAL, Instant::now(), Box::new(move || done.send(7).unwrap()));
        assert_eq!(outcome.await.unwrap(), 7);
        while lane.threads() > 0 {
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn what_waits_or_is_done_is_load_until_it_is_over() {
    let pool = pool(1);
    let load = || pool.load().pending;
    assert_eq!((load(), pool.load().threads, pool.is_free(USUAL)), ([Duration::ZERO; 3], 1, true));
    let held = hold(&pool, USUAL).await;
    assert_eq!(
        (load(), pool.is_free(USUAL), pool.is_free(SHORT)),
        ([Duration::ZERO, USUAL, Duration::ZERO], false, true)
    );
    let ticket = ticket(USUAL);
    let mut more = Box::pin(pool.run(&ticket, || 7));
    assert!(poll!(&mut more).is_pending());
    assert_eq!(load()[1], 2 * USUAL);
    // Nobody waits for it any more.
    drop(more);
    assert_eq!(load()[1], USUAL);
    drop(held);
    while load()[1] > Duration::ZERO || !pool.is_free(USUAL) {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn threads_are_shared_for_large_images_while_others_are_idle() {
    assert!(pool(1).shared(SHARED_PIXELS).is_none());
    let pool = pool(4);
    assert!(pool.shared(SHARED_PIXELS - 1).is_none());
    let _busy = [hold(&pool, USUAL).await, hold(&pool, DEAR).await];
    assert_eq!(pool.shared(SHARED_PIXELS).map(ThreadPool::current_num_threads), Some(4));
    let _busier = hold(&pool, USUAL).await;
    assert!(pool.shared(SHARED_PIXELS).is_none());
}
