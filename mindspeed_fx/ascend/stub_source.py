"""C text of the libraries that stand in for CANN while torch_npu is imported: enough answers for schemas, shapes and
gradients on fake tensors, and no kernels. Host memory stands in for device memory; a kernel launch fails loudly."""

from __future__ import annotations

from typing import Iterable

CORES = {
    "Ascend910B1": (24, 48),
    "Ascend910B2": (24, 48),
    "Ascend910B2C": (24, 48),
    "Ascend910B3": (20, 40),
    "Ascend910B4": (20, 40),
    "Ascend910B4-1": (20, 40),
    "Ascend910_9391": (24, 48),
    "Ascend910_9392": (24, 48),
    "Ascend910_9382": (24, 48),
    "Ascend910_9381": (24, 48),
    "Ascend910_9372": (20, 40),
    "Ascend910_9362": (20, 40),
}
"""SoC -> (cube cores, vector cores), as bishengir-compile's device specification has them."""

# torch_npu looks these up with dlsym, so no ELF table lists them. It says "Failed to find function X" where one is
# missing.
LOOKED_UP = """
aclGetCompileopt aclGetCompileoptSize aclGetRecentErrMsg aclQueryEventRecordedStatus aclSetCompileopt
aclsysGetCANNVersion aclrtCreateEventWithFlag aclrtCtxSetSysParamOpt aclrtDestroyStreamForce aclrtGetDeviceInfo
aclrtGetDeviceSatMode aclrtGetLastError aclrtGetPrimaryCtxState aclrtGetStreamOverflowSwitch aclrtGetSysParamOpt
aclrtMallocAlign32 aclrtMemsetAsync aclrtPeekAtLastError aclrtQueryEventStatus aclrtQueryEventWaitStatus
aclrtSetDeviceSatMode aclrtSetOpExecuteTimeOut aclrtSetOpWaitTimeout aclrtSetStreamFailureMode
aclrtSetStreamOverflowSwitch aclrtSetSysParamOpt aclrtStreamGetId aclrtStreamQuery aclrtSynchronizeDevice
aclrtSynchronizeDeviceWithTimeout aclrtSynchronizeStreamWithTimeout
""".split()

_HEAD = """
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
typedef int32_t i32; typedef uint32_t u32; typedef int64_t i64; typedef size_t n_t; typedef int err;
#define SOC "%(soc)s"
#define DEVICES %(devices)d
#define CUBE %(cube)d
#define VECTOR %(vector)d
#define MEMORY ((size_t)64 << 30)
#define L2 ((int64_t)192 << 20)
static __thread i32 current = 0;
static err block(void **p, n_t n) { *p = aligned_alloc(512, (n + 1023) / 512 * 512); return *p ? 0 : 207001; }
static err handle(void **h) { *h = malloc(64); return *h ? 0 : 207001; }
"""

# Functions whose results are used, each on one line. Every other one is called for its effect alone, and returns 0:
# done.
_BODIES = """
err aclrtGetDeviceCount(u32 *n) { *n = DEVICES; return 0; }
const char *aclrtGetSocName(void) { return SOC; }
err aclrtGetDevice(i32 *d) { *d = current; return 0; }
err aclrtSetDevice(i32 d) { current = d; return 0; }
err aclrtGetCurrentContext(void **c) { static int context; *c = &context; return 0; }
err aclrtGetPrimaryCtxState(i32 d, u32 *flags, i32 *active) { if (flags) *flags = 0; *active = 1; return 0; }
err aclrtGetMemInfo(int kind, n_t *unused, n_t *total) { *unused = *total = MEMORY; return 0; }
err aclrtGetDeviceInfo(u32 d, int what, i64 *v) { *v = what == 101 || what == 102 ? CUBE : what == 201 ? VECTOR \
    : what == 202 ? 32 : what == 301 ? (i64)MEMORY : what == 302 ? L2 : 0; return 0; }
err aclrtGetDeviceResLimit(i32 d, int kind, u32 *v) { *v = kind ? VECTOR : CUBE; return 0; }
err aclGetDeviceCapability(u32 d, int what, i64 *v) { *v = what == 0 ? CUBE : what == 1 ? VECTOR \
    : what == 2 ? L2 : 0; return 0; }
err aclrtDeviceCanAccessPeer(i32 *can, i32 a, i32 b) { *can = 0; return 0; }
err aclrtMalloc(void **p, n_t n, int policy) { return block(p, n); }
err aclrtMallocAlign32(void **p, n_t n, int policy) { return block(p, n); }
err aclrtMallocHost(void **p, n_t n) { return block(p, n); }
err aclrtFree(void *p) { free(p); return 0; }
err aclrtFreeHost(void *p) { free(p); return 0; }
err aclrtMemcpy(void *to, n_t room, const void *from, n_t n, int kind) { memcpy(to, from, n); return 0; }
err aclrtMemcpyAsync(void *to, n_t room, const void *from, n_t n, int kind, void *stream) { \
    memcpy(to, from, n); return 0; }
err aclrtMemset(void *to, n_t room, i32 v, n_t n) { memset(to, v, n); return 0; }
err aclrtMemsetAsync(void *to, n_t room, i32 v, n_t n, void *stream) { memset(to, v, n); return 0; }
err aclrtCreateStream(void **s) { return handle(s); }
err aclrtCreateStreamWithConfig(void **s, u32 priority, u32 flag) { return handle(s); }
err aclrtCreateEventExWithFlag(void **e, u32 flag) { return handle(e); }
err aclrtCreateEventWithFlag(void **e, u32 flag) { return handle(e); }
err aclrtQueryEventStatus(void *e, i32 *done) { *done = 1; return 0; }
err aclrtQueryEventWaitStatus(void *e, i32 *done) { *done = 1; return 0; }
err aclQueryEventRecordedStatus(void *e, i32 *done) { *done = 1; return 0; }
err aclrtStreamQuery(void *s, i32 *done) { *done = 0; return 0; }
err aclrtStreamGetId(void *s, i32 *id) { *id = 0; return 0; }
err aclrtEventElapsedTime(float *ms, void *a, void *b) { *ms = 0; return 0; }
err aclrtGetStreamOverflowSwitch(void *s, u32 *flag) { *flag = 0; return 0; }
err aclrtGetSysParamOpt(int option, i64 *v) { *v = 0; return 0; }
n_t aclGetCompileoptSize(int option) { return 64; }
err aclGetCompileopt(int option, char *v, n_t n) { if (n) v[0] = 0; return 0; }
err aclsysGetCANNVersion(int package, void *v) { memset(v, 0, 128); memcpy(v, "9.0.0", 6); return 0; }
const char *aclGetRecentErrMsg(void) { return "mindspeed_fx: there is no NPU here, only fake tensors can be used"; }
err aclopCompileAndExecute(void) { return 500000; }
"""


def text(soc: str, devices: int, symbols: Iterable[str]) -> str:
    """The C source of one library that defines ``symbols`` and everything that torch_npu looks up.

    Args:
        soc: one of :data:`CORES`.
        devices: how many devices to claim, at least one: attention's shapes ask for the SoC of a device.
    """
    cube, vector = CORES[soc]
    known = {line.split("(")[0].split()[-1].lstrip("*") for line in _BODIES.strip().splitlines()}
    plain = sorted((set(symbols) | set(LOOKED_UP)) - known)
    head = _HEAD % {"soc": soc, "devices": devices, "cube": cube, "vector": vector}
    return "\n".join([head, _BODIES, *(f"long {name}(void) {{ return 0; }}" for name in plain), ""])
