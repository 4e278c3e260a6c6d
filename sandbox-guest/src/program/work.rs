//! A few threads for file work, which may block.
//!
//! Not the runtime's own: those abort the program when no thread can be made, and inside a sandbox at
//! its process limit none can.

use std::{
    collections::VecDeque,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use tokio::sync::oneshot;

const MAX_THREADS: usize = 4;
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const STACK: usize = 128 * 1024;

type Job = Box<dyn FnOnce() + Send>;

/// The threads, and what waits for them.
#[derive(Default)]
pub(crate) struct Pool {
    state: Mutex<State>,
    wake: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    threads: usize,
    idle: usize,
}

impl Pool {
    /// Runs `work` on a thread, or here if there is none to be had.
    pub(crate) async fn run<T, F>(self: &Arc<Self>, work: F) -> Option<T>
    where
        T: Send + 'static,
        F: FnOnce() -> T + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        self.submit(Box::new(move || drop(reply.send(work()))));
        answer.await.ok()
    }

    fn submit(self: &Arc<Self>, job: Job) {
        let mut state = self.lock();
        state.jobs.push_back(job);
        if state.idle >= state.jobs.len() {
            drop(state);
            self.wake.notify_one();
            return;
        }
        if state.threads >= MAX_THREADS {
            return;
        }
        let pool = Arc::clone(self);
        let builder = std::thread::Builder::new().stack_size(STACK);
        match builder.spawn(move || pool.work()) {
            Ok(_) => state.threads += 1,
            Err(_) if state.threads > 0 => {}
            Err(_) => {
                let jobs = std::mem::take(&mut state.jobs);
                drop(state);
                jobs.into_iter().for_each(|job| job());
            }
        }
    }

    fn work(&self) {
        let mut state = self.lock();
        loop {
            if let Some(job) = state.jobs.pop_front() {
                drop(state);
                job();
                state = self.lock();
                continue;
            }
            state.idle += 1;
            let waited = self.wake.wait_timeout(state, KEEP_ALIVE);
            let (guard, timeout) = waited.unwrap_or_else(PoisonError::into_inner);
            state = guard;
            state.idle -= 1;
            if timeout.timed_out() && state.jobs.is_empty() {
                state.threads -= 1;
                return;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
