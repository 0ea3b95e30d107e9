//! The functions of NIXL's C interface, and a session of its library: all unsafe code of this
//! crate.
//!
//! The signatures are those of `wrapper.h` of `nixl-sys` 1.5.2, which the libraries in NIXL's
//! wheels of 1.5.1 export. The functions take and return opaque pointers, numbers and
//! zero-terminated strings. They catch C++ exceptions themselves.

use std::error::Error;
use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::ManuallyDrop;
use std::path::Path;
use std::ptr::{NonNull, null_mut};

use libloading::Library;

use crate::NixlError;
use crate::pool::{Piece, Pool};

type Handle = *mut c_void;

const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 1;
/// The memory type of the CPU's memory.
const DRAM: c_int = 0;
/// The operation of a read.
const READ: c_int = 0;

/// NIXL's defaults, except that its progress thread sleeps instead of busy-polling: messages from
/// other machines wake it.
const CONFIG: Config = Config {
    enable_prog_thread: true,
    enable_listen_thread: false,
    listen_port: 0,
    thread_sync: 0,
    num_workers: 1,
    pthr_delay_us: 100_000,
    lthr_delay_us: 100_000,
    capture_telemetry: false,
};

/// The C structure `nixl_capi_agent_config_s`.
#[repr(C)]
struct Config {
    enable_prog_thread: bool,
    enable_listen_thread: bool,
    listen_port: c_int,
    thread_sync: c_int,
    num_workers: c_uint,
    pthr_delay_us: u64,
    lthr_delay_us: u64,
    capture_telemetry: bool,
}

/// The backend that moves the bytes.
const BACKEND: &CStr = c"UCX";

macro_rules! functions {
    ($($name:ident: fn($($argument:ty),*);)*) => {
        /// The library's functions. Each returns 0, or a negative error code.
        struct Functions {
            $($name: unsafe extern "C" fn($($argument),*) -> c_int,)*
            /// Returns `true` for a stub that is made for linking and does nothing.
            is_stub: unsafe extern "C" fn() -> bool,
        }

        impl Functions {
            /// Looks up all functions.
            fn find(library: &'static Library) -> Result<Self, libloading::Error> {
                // SAFETY: these are the signatures of the C interface by these names. The library
                // is never unloaded, so the functions are there for as long as the process.
                unsafe {
                    Ok(Self {
                        $($name: *library.get(concat!("nixl_capi_", stringify!($name)))?,)*
                        is_stub: *library.get("nixl_capi_is_stub")?,
                    })
                }
            }
        }
    };
}

functions! {
    create_configured_agent: fn(*const c_char, *const Config, *mut Handle);
    create_params: fn(*mut Handle);
    params_add: fn(Handle, *const c_char, *const c_char);
    destroy_params: fn(Handle);
    create_backend: fn(Handle, *const c_char, Handle, *mut Handle);
    create_reg_dlist: fn(c_int, *mut Handle);
    reg_dlist_add_desc: fn(Handle, usize, usize, u64, *const c_void, usize);
    destroy_reg_dlist: fn(Handle);
    register_mem: fn(Handle, Handle, Handle);
    get_local_md: fn(Handle, *mut *mut c_void, *mut usize);
    load_remote_md: fn(Handle, *const c_void, usize, *mut *mut c_char);
    invalidate_remote_md: fn(Handle, *const c_char);
    create_xfer_dlist: fn(c_int, *mut Handle);
    xfer_dlist_add_desc: fn(Handle, usize, usize, u64);
    destroy_xfer_dlist: fn(Handle);
    create_xfer_req: fn(Handle, c_int, Handle, Handle, *const c_char, *mut Handle, Handle);
    post_xfer_req: fn(Handle, Handle, Handle);
    get_xfer_status: fn(Handle, Handle);
    release_xfer_req: fn(Handle, Handle);
    destroy_xfer_req: fn(Handle);
}

unsafe extern "C" {
    /// The C library's `free`, for memory that the functions above allocate.
    fn free(memory: *mut c_void);
}

/// A NIXL agent with its registered memory: one end of reads.
///
/// It is never destroyed, and its memory is never unmapped: peers may read it at any time, and a
/// read of unmapped memory over TCP ends the owner's process.
///
/// Its methods for other modules need `&mut self`, because the library must be called by one thread
/// at a time.
pub(crate) struct Session {
    functions: Functions,
    agent: NonNull<c_void>,
}

// SAFETY: the library's objects are not bound to a thread. NIXL does not synchronise calls of
// several threads, which `&mut self` rules out.
unsafe impl Send for Session {}

/// A read that was started.
///
/// The library has exclusive access to the target memory until the read has ended. Dropping a
/// request frees neither the memory nor the library's object, because the library can't reliably
/// cancel a read. Late bytes are then written into memory that is never used again.
pub(crate) struct ReadRequest {
    handle: NonNull<c_void>,
    into: ManuallyDrop<Piece>,
}

// SAFETY: the library's objects are not bound to a thread, and a request has no methods that call
// the library.
unsafe impl Send for ReadRequest {}

impl ReadRequest {
    /// Abandons a read that has not ended. Its memory is never used again.
    pub(crate) fn abandon(self) {}
}

impl Session {
    /// Opens the library, which is never unloaded, and registers the memory of a pool. `devices`
    /// are those that UCX may use, as in its `UCX_NET_DEVICES`.
    pub(crate) fn open(
        library: &Path,
        name: &str,
        devices: Option<&str>,
        pool: &Pool,
    ) -> Result<Self, NixlError> {
        let unusable = |error: libloading::Error| {
            let reason = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            NixlError::Library { path: library.to_owned(), reason }
        };
        // SAFETY: loading runs code of a library that the operator names and trusts like this
        // program.
        let opened = unsafe { Library::new(library) }.map_err(unusable)?;
        // The library is never unloaded, because its threads run until the process ends.
        let opened: &'static Library = Box::leak(Box::new(opened));
        let functions = Functions::find(opened).map_err(unusable)?;
        // SAFETY: the function has no arguments and no preconditions.
        if unsafe { (functions.is_stub)() } {
            return Err(NixlError::Stub { path: library.to_owned() });
        }
        let mut agent = null_mut();
        let name = c_string(name)?;
        // SAFETY: the arguments are a zero-terminated string and a structure, which are both
        // copied, and a valid output pointer.
        let created =
            unsafe { (functions.create_configured_agent)(name.as_ptr(), &CONFIG, &mut agent) };
        check("create_configured_agent", created)?;
        let agent = NonNull::new(agent)
            .ok_or(NixlError::Failed { call: "create_configured_agent", code: SUCCESS })?;
        let session = Self { functions, agent };
        session.create_backend(devices)?;
        session.register(pool)?;
        Ok(session)
    }

    /// Creates the UCX backend.
    fn create_backend(&self, devices: Option<&str>) -> Result<(), NixlError> {
        let Functions { create_params, params_add, destroy_params, create_backend, .. } =
            &self.functions;
        let mut params = null_mut();
        let mut backend = null_mut();
        // UCX_NET_DEVICES takes precedence over this setting.
        let devices =
            devices.map(|devices| c_string(&format!("NET_DEVICES={devices}"))).transpose()?;
        // SAFETY: `params` was just created and is not used after its destruction. Strings are
        // zero-terminated and copied. The other pointers are valid outputs. The backend lives as
        // long as the agent, so its pointer need not be kept.
        unsafe {
            check("create_params", create_params(&mut params))?;
            let added = devices.map_or(SUCCESS, |devices| {
                params_add(params, c"engine_config".as_ptr(), devices.as_ptr())
            });
            let created = match added {
                SUCCESS => {
                    create_backend(self.agent.as_ptr(), BACKEND.as_ptr(), params, &mut backend)
                }
                failed => failed,
            };
            destroy_params(params);
            check("create_backend", created)
        }
    }

    /// Registers the memory of a pool.
    fn register(&self, pool: &Pool) -> Result<(), NixlError> {
        let Functions {
            create_reg_dlist, reg_dlist_add_desc, destroy_reg_dlist, register_mem, ..
        } = &self.functions;
        let (address, length) = pool.extent();
        let mut list = null_mut();
        // SAFETY: the list was just created and is not used after its destruction. The memory of a
        // pool stays mapped at its address until the process ends.
        unsafe {
            check("create_reg_dlist", create_reg_dlist(DRAM, &mut list))?;
            let registered = match reg_dlist_add_desc(list, address, length, 0, std::ptr::null(), 0)
            {
                SUCCESS => register_mem(self.agent.as_ptr(), list, null_mut()),
                failed => failed,
            };
            destroy_reg_dlist(list);
            check("register_mem", registered)
        }
    }

    /// Returns the metadata that another session needs to read this one's memory.
    pub(crate) fn metadata(&mut self) -> Result<Vec<u8>, NixlError> {
        let mut data = null_mut();
        let mut length = 0;
        // SAFETY: the arguments are valid outputs for a pointer and a length. The function returns
        // that many bytes from malloc, which are only used here.
        unsafe {
            check(
                "get_local_md",
                (self.functions.get_local_md)(self.agent.as_ptr(), &mut data, &mut length),
            )?;
            let copy = if data.is_null() {
                Vec::new()
            } else {
                std::slice::from_raw_parts(data.cast::<u8>(), length).to_vec()
            };
            free(data);
            Ok(copy)
        }
    }

    /// Loads the metadata of another session. Returns the session's name, for the other calls.
    pub(crate) fn load(&mut self, metadata: &[u8]) -> Result<CString, NixlError> {
        let mut name = null_mut();
        let bytes = metadata.as_ptr().cast();
        let length = metadata.len();
        // SAFETY: the bytes are copied. The returned name is a string from malloc, which is only
        // used here.
        unsafe {
            check(
                "load_remote_md",
                (self.functions.load_remote_md)(self.agent.as_ptr(), bytes, length, &mut name),
            )?;
            let copy =
                if name.is_null() { CString::default() } else { CStr::from_ptr(name).to_owned() };
            free(name.cast());
            Ok(copy)
        }
    }

    /// Removes the metadata of another session and closes the connections to it.
    pub(crate) fn forget(&mut self, name: &CStr) -> Result<(), NixlError> {
        // SAFETY: the name is zero-terminated and copied.
        let forgotten =
            unsafe { (self.functions.invalidate_remote_md)(self.agent.as_ptr(), name.as_ptr()) };
        check("invalidate_remote_md", forgotten)
    }

    /// Starts a read of memory of another session into a piece of this session's pool, of the
    /// length of the piece.
    pub(crate) fn read(
        &mut self,
        mut into: Piece,
        name: &CStr,
        address: u64,
    ) -> Result<ReadRequest, NixlError> {
        let Functions { create_xfer_req, post_xfer_req, .. } = &self.functions;
        let to = into.as_mut().as_mut_ptr() as usize;
        let length = into.as_ref().len();
        let from = usize::try_from(address).map_err(|_| NixlError::InvalidAddress(address))?;
        let local = self.descriptor_list(to, length)?;
        let remote = self.descriptor_list(from, length)?;
        let mut handle = null_mut();
        let agent = self.agent.as_ptr();
        let name = name.as_ptr();
        // SAFETY: the lists live until after the call, which copies them and the name.
        let created = unsafe {
            create_xfer_req(agent, READ, local.list, remote.list, name, &mut handle, null_mut())
        };
        drop((local, remote));
        check("create_xfer_req", created)?;
        let handle = NonNull::new(handle)
            .ok_or(NixlError::Failed { call: "create_xfer_req", code: SUCCESS })?;
        let request = ReadRequest { handle, into: ManuallyDrop::new(into) };
        // SAFETY: the request was just created. Its piece belongs to the registered pool. Only the
        // library accesses the piece until the read has ended, or forever: see `ReadRequest`.
        match unsafe { post_xfer_req(agent, handle.as_ptr(), null_mut()) } {
            SUCCESS | IN_PROGRESS => Ok(request),
            code => match self.end(request) {
                Some(_) => Err(NixlError::Failed { call: "post_xfer_req", code }),
                None => Err(NixlError::MemoryNotReleased),
            },
        }
    }

    /// Creates a descriptor list of one memory range.
    fn descriptor_list(
        &self,
        address: usize,
        length: usize,
    ) -> Result<DescriptorList<'_>, NixlError> {
        let mut list = null_mut();
        // SAFETY: the argument is a valid output pointer.
        check("create_xfer_dlist", unsafe { (self.functions.create_xfer_dlist)(DRAM, &mut list) })?;
        let descriptors = DescriptorList { list, functions: &self.functions };
        // SAFETY: the list was just created.
        check("xfer_dlist_add_desc", unsafe {
            (self.functions.xfer_dlist_add_desc)(list, address, length, 0)
        })?;
        Ok(descriptors)
    }

    /// Returns `true` if a read has ended. After an error it has ended, too.
    pub(crate) fn has_ended(&mut self, request: &ReadRequest) -> Result<bool, NixlError> {
        // SAFETY: the handle was created by this session and is destroyed only with its request.
        let status = unsafe {
            (self.functions.get_xfer_status)(self.agent.as_ptr(), request.handle.as_ptr())
        };
        match status {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            code => Err(NixlError::Failed { call: "get_xfer_status", code }),
        }
    }

    /// Returns the memory of a read that has ended. Returns `None` if the library does not release
    /// it; then it must never be used again.
    pub(crate) fn end(&mut self, request: ReadRequest) -> Option<Piece> {
        // SAFETY: the handle was created by this session. After its release it is only destroyed,
        // as the interface requires.
        let released = unsafe {
            (self.functions.release_xfer_req)(self.agent.as_ptr(), request.handle.as_ptr())
        };
        if released != SUCCESS {
            return None;
        }
        // SAFETY: the handle was released and is not used afterwards, as the request ends here.
        unsafe { (self.functions.destroy_xfer_req)(request.handle.as_ptr()) };
        Some(ManuallyDrop::into_inner(request.into))
    }
}

/// A descriptor list of one memory range, destroyed on drop.
struct DescriptorList<'a> {
    list: Handle,
    functions: &'a Functions,
}

impl Drop for DescriptorList<'_> {
    fn drop(&mut self) {
        // SAFETY: the list was created by this library and is not used afterwards.
        unsafe { (self.functions.destroy_xfer_dlist)(self.list) };
    }
}

/// Converts a status to a result.
fn check(call: &'static str, code: c_int) -> Result<(), NixlError> {
    if code == SUCCESS { Ok(()) } else { Err(NixlError::Failed { call, code }) }
}

/// Converts text to a zero-terminated string.
fn c_string(text: &str) -> Result<CString, NixlError> {
    CString::new(text).map_err(|_| NixlError::ZeroByte(text.to_owned()))
}
