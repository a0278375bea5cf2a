// How many CPUs this process may use: the affinity mask, and the cgroup's quota (v1 and v2).

#include <sched.h>

#include <algorithm>
#include <fstream>
#include <set>
#include <sstream>
#include <string>
#include <thread>

#include "common/thread_pool.h"

namespace aioserve {
namespace {

std::string read_line(const std::string& path) {
    std::ifstream file(path);
    std::string line;
    std::getline(file, line);
    return line;
}

// v2: "max 100000" or "200000 100000".
double quota_v2(const std::string& directory) {
    std::istringstream line(read_line(directory + "/cpu.max"));
    double quota = 0, period = 0;
    return line >> quota >> period && period > 0 ? quota / period : 0;
}

double quota_v1(const std::string& directory) {
    std::istringstream quota_line(read_line(directory + "/cpu.cfs_quota_us"));
    std::istringstream period_line(read_line(directory + "/cpu.cfs_period_us"));
    double quota = 0, period = 0;
    if (!(quota_line >> quota) || !(period_line >> period)) return 0;
    return quota > 0 && period > 0 ? quota / period : 0;
}

// The tightest quota from the process's own group up to the root. Inside a container the group's
// path may not exist below the mount; the mount's root is then the container's own group.
template <class Quota>
double tightest(const std::string& mount, std::string group, Quota quota_of) {
    double tightest = 0;
    for (;;) {
        const double quota = quota_of(mount + group);
        if (quota > 0 && (tightest == 0 || quota < tightest)) tightest = quota;
        const auto slash = group.find_last_of('/');
        if (slash == std::string::npos || group.empty()) return tightest;
        group.resize(slash);
    }
}

}  // namespace

double cgroup_cpus() {
    std::ifstream file("/proc/self/cgroup");
    for (std::string line; std::getline(file, line);) {  // "id:controllers:/group"
        const auto first = line.find(':');
        const auto second = line.find(':', first + 1);
        if (first == std::string::npos || second == std::string::npos) continue;
        std::string controllers = line.substr(first, second - first);  // ":cpu,cpuacct"
        controllers[0] = ',';
        controllers += ',';
        const std::string group = line.substr(second + 1);
        double quota = 0;
        if (controllers == ",,") {
            quota = tightest("/sys/fs/cgroup", group, quota_v2);
        } else if (controllers.find(",cpu,") != std::string::npos) {
            quota = tightest("/sys/fs/cgroup/cpu", group, quota_v1);
        }
        if (quota > 0) return quota;
    }
    return 0;
}

int affinity_cpus() {
    cpu_set_t mask;
    CPU_ZERO(&mask);
    if (sched_getaffinity(0, sizeof(mask), &mask) != 0)
        return std::max(1u, std::thread::hardware_concurrency());
    // Two hyperthreads share the units that these kernels keep busy: count each core once.
    std::set<std::string> cores;
    for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
        if (!CPU_ISSET(cpu, &mask)) continue;
        const std::string siblings = read_line("/sys/devices/system/cpu/cpu" + std::to_string(cpu) +
                                               "/topology/thread_siblings_list");
        cores.insert(siblings.empty() ? std::to_string(cpu) : siblings);
    }
    return std::max<int>(1, static_cast<int>(cores.size()));
}

}  // namespace aioserve
